"""CANN's `bin` files: a header's length, the header, then the payloads back to back.

The order of payloads is inputs, outputs, buffers, workspaces, though the header has outputs first
(ascend-formats.md 1.4). Packed with `zstd`, a file is one frame for all up to the payloads and one
for each payload, so that `zstd -d` gives the plain file and a payload can be read alone.
"""

from rankdump.dumpdata.elements import array, type_name
from rankdump.dumpdata.file import BinFile, Payload, head, open_bin, open_header, parse
from rankdump.dumpdata.rendering import header_json

__all__ = [
    "BinFile",
    "Payload",
    "array",
    "head",
    "header_json",
    "open_bin",
    "open_header",
    "parse",
    "type_name",
]
