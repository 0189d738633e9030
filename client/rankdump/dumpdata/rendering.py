"""A header as the JSON that CANN's tools make of it (ascend-formats.md 1.5). Pure."""

from __future__ import annotations

import base64
import json
from dataclasses import fields, is_dataclass
from typing import Any, cast

from rankdump.contract.dumpdata import DumpData

_UINT64 = frozenset(("dim", "dim_start", "dim_end", "size", "address", "offset", "dump_time"))
"""Fields of 64 bits: as texts, because a number of JSON may hold 53."""


def header_json(header: DumpData) -> str:
    """Return a header as indented JSON: names as in the message, defaults too, enums as numbers.

    Fields that this description does not know are left out, as protobuf does.
    """
    return json.dumps(_rendered("", header), indent=1, ensure_ascii=False)


def _rendered(name: str, value: Any) -> Any:
    if is_dataclass(value):
        held = {f.name: getattr(value, f.name) for f in fields(value) if f.name != "extra"}
        return {name: _rendered(name, each) for name, each in held.items() if each is not None}
    if isinstance(value, tuple):
        return [_rendered(name, each) for each in cast("tuple[Any, ...]", value)]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    return str(value) if name in _UINT64 else value
