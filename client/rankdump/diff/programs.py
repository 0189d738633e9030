"""A dump to programs: what each rank ran in each iteration, call by call, in execution order.

The order is that of the time stamps, which every layout has: files and rows carry them, and a
tree without any is given them by the lines of its info file. The constants of a rank are a program
of their own, whose iteration is CONSTANTS.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TypeAlias

from rankdump.contract.errors import DamagedError
from rankdump.contract.key import Side, TensorKey, sanitised
from rankdump.contract.layout import api_name, statistic_csv
from rankdump.contract.selection import GRADIENTS
from rankdump.contract.statistics import ITEMS, MD5
from rankdump.diff.values import CONSTANTS, NO_FIGURES, Call, Program, Tensor
from rankdump.reader import Dump, Entry, Figures

RECOMPUTED = "Recompute/"
"""In front of the name of a call that is run again by activation checkpointing."""

_Named: TypeAlias = "Entry | Figures"
_Place: TypeAlias = "tuple[int, int]"
_Where: TypeAlias = "tuple[int, int, int, str, int, str]"
_Tensors: TypeAlias = "dict[tuple[Side, int], Tensor]"
"""Of a call that is being put together, by side and slot."""
_REPEATED = f":{api_name.RECOMPUTED}"
_NUMBERS = {title: item for item, title in ITEMS.items() if item != MD5}


def programs_of(dump: Dump, problems: list[str] | None = None) -> list[Program]:
    """Return the programs of a dump, by rank and iteration; constants stand first.

    A tensor that has a file and a row of figures is one tensor. A tree whose tables are damaged
    is compared without figures when it has files; `problems` then says so, and without that list
    DamagedError is raised.
    """
    entries: defaultdict[_Place, list[Entry]] = defaultdict(list)
    rows: defaultdict[_Place, dict[_Where, Figures]] = defaultdict(dict)
    for row in _figures(dump, problems):
        rows[_place(row.key)][_where(row.key)] = row
    for entry in dump.tensors():
        entries[_place(entry.key)].append(entry)
    places = sorted({*entries, *rows})
    return [_program(place, entries[place], rows[place]) for place in places]


def _figures(dump: Dump, problems: list[str] | None) -> list[Figures]:
    try:
        return dump.statistics()
    except DamagedError as error:
        if problems is None:
            raise
        problems.append(f"figures are left out: {error}")
        return []


def _place(key: TensorKey) -> _Place:
    return key.rank, CONSTANTS if key.constant else key.iteration


def _where(key: TensorKey) -> _Where:
    # Files and tables spell a name differently, in some releases.
    name = statistic_csv.field(sanitised(key.op_name))
    return key.timestamp_us, key.graph, key.slot, key.side.value, key.stream, name


def _program(place: _Place, entries: list[Entry], rows: dict[_Where, Figures]) -> Program:
    left = dict(rows)
    named: list[tuple[_Named, Figures | None]] = [
        (entry, left.pop(_where(entry.key), None) if left else None) for entry in entries
    ]
    named.extend((row, row) for row in left.values())
    named.sort(key=_in_time)
    calls: list[tuple[_Named, _Tensors]] = []
    latest: dict[tuple[int, str], _Tensors] = {}
    for seen, (tensor, row) in enumerate(named):
        key = tensor.key
        name, at = (key.graph, tensor.op_name), (key.side, key.slot)
        tensors = latest.get(name)
        # What a call has already belongs to the next one of that name.
        if tensors is None or at in tensors:
            tensors = latest[name] = {}
            calls.append((tensor, tensors))
        tensors[at] = _tensor(tensor, row, seen)
    rank, iteration = place
    called = (_call(at, first, list(of.values())) for at, (first, of) in enumerate(calls))
    return Program(rank, iteration, tuple(called))


def _in_time(named: tuple[_Named, Figures | None]) -> tuple[int, str, int]:
    key = named[0].key
    return key.timestamp_us, key.side, key.slot


def _call(position: int, first: _Named, tensors: list[Tensor]) -> Call:
    name = first.op_name
    api = api_name.call_of(name)
    backward = name.startswith(GRADIENTS) or (api is not None and api.direction == "backward")
    repeated = name.startswith(RECOMPUTED) or any(
        tensor.argument.endswith(_REPEATED) for tensor in tensors
    )
    sides = _sides(tensors)
    return Call(position, first.op_type, name, *sides, first.key.graph, backward, repeated)


def _sides(tensors: list[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return inputs and outputs, each by slot."""
    if len(tensors) == 1:  # most parameters and gradients
        alone = (tensors[0],)
        return (alone, ()) if alone[0].side is Side.INPUT else ((), alone)
    tensors.sort(key=lambda tensor: tensor.slot)
    inputs = [tensor for tensor in tensors if tensor.side is Side.INPUT]
    return tuple(inputs), tuple([tensor for tensor in tensors if tensor.side is Side.OUTPUT])


def _tensor(tensor: _Named, row: Figures | None, seen: int) -> Tensor:
    key, record = tensor.key, tensor.record
    if record is not None:
        said = record.argument, record.dtype, record.shape, record.digest
    else:
        said = "", *_kind(tensor, row), ""
    entry = tensor if isinstance(tensor, Entry) else None
    figures = _numbers(row) if row is not None else NO_FIGURES
    return Tensor(key.side, key.slot, *said, entry, figures, seen)


def _kind(tensor: _Named, row: Figures | None) -> tuple[str, tuple[int, ...] | None]:
    """Return element type and shape without a manifest, from whoever knows them unopened."""
    if row is not None:
        return row.dtype, row.shape
    if isinstance(tensor, Entry) and tensor.described is not None:
        return tensor.described.dtype, tensor.described.shape
    return tensor.key.element.lower(), None


def _numbers(row: Figures) -> Mapping[str, float]:
    found: dict[str, float] = {}
    for title in row.values:
        item = _NUMBERS.get(title)
        number = row.number(item) if item is not None else None
        if item is not None and number is not None:
            found[item] = number
    return found
