"""Targets for names: parsing of file paths, and paths made from operator names."""

from __future__ import annotations

from rankdump._core.execution_order import add_job_tag, make_job_tag, parse_order_file_name
from rankdump._core.record import TensorKey, TensorSide
from rankdump._layout.api_files import make_stack_key as stack_key_of
from rankdump._layout.api_files import parse_stack_key
from rankdump._layout.api_tree import parse_api_file_name as api_file_of
from rankdump._layout.api_tree import parse_call_name, parse_place, parse_tensor_name
from rankdump._layout.dump_folders import find_folder, parse_name_in_folder, parse_tensor_path
from rankdump._layout.file_name import LongFileNames, parse_exception_name, parse_file_name
from rankdump._layout.tree_layouts import LAYOUTS
from rankdump._layout.tree_paths import MAX_NAME_BYTES, FilePlace, TreeContext
from rankdump._layout.tree_paths import parse_mindspore_name as synchronous_file_of

_LAYOUTS = tuple(LAYOUTS.values())
_STAND = TreeContext("/trees/a", 3, "20261121175901")


def paths(data: bytes) -> None:
    """A path in a tree, and the `mapping.csv` beside it: whatever they are, nobody falls."""
    mapping, _, raw = data.partition(b"\0")
    path = raw.decode("utf-8", "surrogateescape")
    key = parse_tensor_path(path)
    assert key is None or (key.slot >= 0 and key.rank >= 0)
    parent, _, name = path.rpartition("/")
    name = LongFileNames.parse(mapping).get_full_name(name)
    folder = find_folder(parent)
    if folder is not None:
        parse_name_in_folder(folder, name)
    for read in (
        parse_file_name,
        parse_exception_name,
        synchronous_file_of,
        api_file_of,
        parse_order_file_name,
    ):
        read(name)
    for read in (parse_call_name, parse_place, parse_tensor_name, parse_stack_key):
        read(name)


def places(data: bytes) -> None:
    """An operator of any name, in any layout: it stays in its folder, and its path is readable."""
    key = _key(data)
    layout = _LAYOUTS[data[0] % len(_LAYOUTS) if data else 0]
    _check(layout.place_tensor(key, _STAND, ".zst"))
    if layout.shares_timestamps:
        _check(layout.place_operator(key, _STAND, ".zst"))
        _check(layout.place_member(key, _STAND, ""))
    readable = layout.make_readable_key(key, _STAND)
    again = layout.place_tensor(readable, _STAND, ".zst")
    assert not again.mapped_from or len(again.mapped_from.encode(errors="replace")) > 200
    name = add_job_tag("findings.jsonl", make_job_tag(key.op_name))
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
        side=TensorSide.INPUT if number % 2 else TensorSide.OUTPUT,
        slot=number % 7,
        constant=number % 5 == 0,
        element=element if number % 3 else "",
        argument=argument,
    )


def _check(place: FilePlace) -> None:
    parts = place.path.split("/")
    assert not {"", ".", ".."} & set(parts)
    assert "\0" not in place.path
    assert all(len(part.encode()) <= MAX_NAME_BYTES for part in parts)
    assert "\n" not in place.mapped_from
    parse_tensor_path(place.path)
    parse_tensor_path(f"{place.folder}/{place.mapped_from or place.name}")
