"""Runs CANN's own msaccucmp.py without CANN, with the same arguments.

Everything is msaccucmp's but one step: a closed library turns a file's header into JSON there. Here
a table of fields does, made from the published description of the message (CANN 8 operator dump
documentation), and nothing of rankdump. Runs under the Python of a virtual environment that has
mindstudio-probe.
"""

# pyright: basic, reportMissingImports=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false

import importlib.util
import runpy
import sys
from pathlib import Path

# Number -> (name, whether it repeats, what it is): an integer, a text, or a message.
SHAPE = {1: ("dim", True, int)}
ORIGINAL = {
    1: ("name", False, str),
    2: ("output_index", False, int),
    3: ("data_type", False, int),
    4: ("format", False, int),
}
TENSOR = {1: ("data_type", False, int), 2: ("format", False, int), 3: ("shape", False, SHAPE)}
OUTPUT = {
    **TENSOR,
    4: ("original_op", False, ORIGINAL),
    6: ("size", False, int),
    7: ("original_shape", False, SHAPE),
    8: ("sub_format", False, int),
    9: ("address", False, int),
}
INPUT = {
    **TENSOR,
    5: ("size", False, int),
    6: ("original_shape", False, SHAPE),
    7: ("sub_format", False, int),
    8: ("address", False, int),
}
BUFFER = {1: ("buffer_type", False, int), 3: ("size", False, int)}
SPACE = {1: ("type", False, int), 3: ("size", False, int)}
DUMP_DATA = {
    1: ("version", False, str),
    2: ("dump_time", False, int),
    3: ("output", True, OUTPUT),
    4: ("input", True, INPUT),
    5: ("buffer", True, BUFFER),
    6: ("op_name", False, str),
    8: ("space", True, SPACE),
}


def varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def message(data, fields):
    """Return a message as the library's JSON has it: what is not there has its default."""
    found = {name: [] for name, repeats, _ in fields.values() if repeats}
    found |= {name: 0 for name, repeats, kind in fields.values() if not repeats and kind is int}
    at = 0
    while at < len(data):
        tag, at = varint(data, at)
        value, at = varint(data, at)
        if tag & 7 == 2:
            value, at = data[at : at + value], at + value
        name, repeats, kind = fields.get(tag >> 3, ("", False, int))
        if isinstance(kind, dict):
            value = message(value, kind)
        elif isinstance(value, bytes):
            value = packed(value) if kind is int else value.decode()
        if repeats:
            found[name].extend(value if isinstance(value, list) else [value])
        elif name:
            found[name] = value
    return found


def packed(data):
    values, at = [], 0
    while at < len(data):
        value, at = varint(data, at)
        values.append(value)
    return values


def parse_header(parser):
    data = Path(parser.dump_file_path).read_bytes()
    length = int.from_bytes(data[:8], "little")
    parser.dump_json_data = message(data[8 : 8 + length], DUMP_DATA)


if __name__ == "__main__":
    folder = Path(importlib.util.find_spec("msprobe").origin).parent / "msaccucmp"
    sys.path.insert(0, str(folder))
    from dump_parse.big_dump_data import BigDumpDataParser

    BigDumpDataParser._parse_dump_to_json = parse_header
    runpy.run_path(str(folder / "msaccucmp.py"), run_name="__main__")
