"""Names: paths of files to what they say, and what operators are called to paths."""

from __future__ import annotations

from rankdump.contract.key import Side, TensorKey
from rankdump.contract.layout.api_name import call_of, place_of, tensor_of
from rankdump.contract.layout.api_stacks import key_of as stack_key_of
from rankdump.contract.layout.api_stacks import op_name_of
from rankdump.contract.layout.api_tree import file_of as api_file_of
from rankdump.contract.layout.file_name import parsed, parsed_exception
from rankdump.contract.layout.folders import folder_at
from rankdump.contract.layout.layouts import LAYOUTS
from rankdump.contract.layout.long_names import LongNames
from rankdump.contract.layout.mindspore_sync import file_of as synchronous_file_of
from rankdump.contract.layout.place import NAME_MAX_BYTES, Place, Stand
from rankdump.contract.layout.reading import file_in, key_of
from rankdump.contract.order import graph_and_tag, tag_of, tagged

_LAYOUTS = tuple(LAYOUTS.values())
_STAND = Stand("/trees/a", 3, "20261121175901")


def paths(data: bytes) -> None:
    """A path in a tree, and the `mapping.csv` beside it: whatever they are, nobody falls."""
    mapping, _, raw = data.partition(b"\0")
    path = raw.decode("utf-8", "surrogateescape")
    key = key_of(path)
    assert key is None or (key.slot >= 0 and key.rank >= 0)
    parent, _, name = path.rpartition("/")
    name = LongNames.parsed(mapping).full(name)
    folder = folder_at(parent)
    if folder is not None:
        file_in(folder, name)
    for read in (parsed, parsed_exception, synchronous_file_of, api_file_of, graph_and_tag):
        read(name)
    for read in (call_of, place_of, tensor_of, op_name_of):
        read(name)


def places(data: bytes) -> None:
    """An operator of any name, in any layout: it stays in its folder, and its path is readable."""
    key = _key(data)
    layout = _LAYOUTS[data[0] % len(_LAYOUTS) if data else 0]
    _check(layout.place_of(key, _STAND, ".zst"))
    if layout.shares_stamps:
        _check(layout.operator_place(key, _STAND, ".zst"))
        _check(layout.member_place(key, _STAND, ""))
    readable = layout.readable(key, _STAND)
    again = layout.place_of(readable, _STAND, ".zst")
    assert not again.mapped_from or len(again.mapped_from.encode(errors="replace")) > 200
    name = tagged("findings.jsonl", tag_of(key.op_name))
    assert "/" not in name
    stack_key_of("torch", key.op_name)


def _key(data: bytes) -> TensorKey:
    number = int.from_bytes(data[1:9], "little")
    texts = data[9:].decode("utf-8", "surrogateescape").split("\0")
    op_type, op_name, argument, element, *_ = (*texts, "", "", "", "")
    return TensorKey(
        rank=number % 97,
        net_name="Net",
        graph=number % 11,
        iteration=number % 1009,
        timestamp_us=number,
        op_type=op_type,
        op_name=op_name,
        side=Side.INPUT if number % 2 else Side.OUTPUT,
        slot=number % 7,
        constant=number % 5 == 0,
        element=element if number % 3 else "",
        argument=argument,
    )


def _check(place: Place) -> None:
    parts = place.path.split("/")
    assert not {"", ".", ".."} & set(parts)
    assert "\0" not in place.path
    assert all(len(part.encode()) <= NAME_MAX_BYTES for part in parts)
    assert "\n" not in place.mapped_from
    key_of(place.path)
    key_of(f"{place.folder}/{place.mapped_from or place.name}")
