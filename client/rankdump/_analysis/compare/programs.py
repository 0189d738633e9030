"""Programs of a dump: the calls that each rank ran in each iteration, in execution order.

The order is given by the time stamps of files and rows; in a tree without time stamps, by the lines
of the info file. The constants of a rank are a separate program, whose iteration is
CONSTANTS_ITERATION.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias

from rankdump._analysis.compare.report import (
    CONSTANTS_ITERATION,
    NO_STATISTICS,
    DumpedCall,
    DumpedProgram,
    DumpedTensor,
    ProgramPlace,
)
from rankdump._analysis.reader.dump import Dump
from rankdump._analysis.reader.fingerprints import FingerprintsByRecord
from rankdump._analysis.reader.tree import Entry, Figures
from rankdump._core.record import TensorKey, TensorSide, sanitize_name
from rankdump._core.selection import GRADIENTS_PREFIX, RECOMPUTED_PREFIX, has_scope_prefix
from rankdump._core.statistics import MD5_ITEM, STATISTIC_TITLES
from rankdump._layout import api_tree, statistic_tables
from rankdump._layout.foreign_calls import FOREIGN_TITLES
from rankdump.errors import CorruptedError

_NamedTensor: TypeAlias = "Entry | Figures"
_TensorPlace: TypeAlias = "tuple[int, int, int, str, int, str]"
_CallTensors: TypeAlias = "dict[tuple[TensorSide, int], DumpedTensor]"
"""Tensors of one call, by side and slot."""
_RECOMPUTED_SUFFIX = f":{api_tree.RECOMPUTED_MARK}"
_STATISTIC_ITEMS = {
    title: item for item, title in (STATISTIC_TITLES | FOREIGN_TITLES).items() if item != MD5_ITEM
}


def read_programs(dump: Dump, problems: list[str]) -> list[DumpedProgram]:
    """Return the programs of a dump, sorted by rank and iteration; constants come first.

    A tensor with both a file and a row of statistics is one tensor. If tables are damaged,
    statistics are ignored and `problems` gets a sentence. Fingerprints are not read; see
    `add_fingerprints`.
    """
    entries: defaultdict[ProgramPlace, list[Entry]] = defaultdict(list)
    rows: defaultdict[ProgramPlace, dict[_TensorPlace, Figures]] = defaultdict(dict)
    try:
        for row in dump.statistics():
            rows[_get_program_place(row.key)][_make_tensor_place(row.key)] = row
    except CorruptedError as error:
        problems.append(f"statistics are ignored: {error}")
    for entry in dump.tensors():
        entries[_get_program_place(entry.key)].append(entry)
    places = sorted({*entries, *rows})
    return [_build_program(place, entries[place], rows[place]) for place in places]


def add_fingerprints(
    programs: Sequence[DumpedProgram], prints: FingerprintsByRecord
) -> list[DumpedProgram]:
    """Return the programs with the fingerprints of their tensors' records."""
    if not prints:
        return list(programs)

    def add(rank: int, tensors: tuple[DumpedTensor, ...]) -> tuple[DumpedTensor, ...]:
        found = ((each, each.record) for each in tensors)
        return tuple(
            [
                each._replace(fingerprint=prints.get((rank, record))) if record else each
                for each, record in found
            ]
        )

    return [
        replace(
            program,
            calls=tuple(
                call._replace(
                    inputs=add(program.rank, call.inputs), outputs=add(program.rank, call.outputs)
                )
                for call in program.calls
            ),
        )
        for program in programs
    ]


def _get_program_place(key: TensorKey) -> ProgramPlace:
    return key.rank, CONSTANTS_ITERATION if key.constant else key.iteration


def _make_tensor_place(key: TensorKey) -> _TensorPlace:
    # In some releases, file names and tables spell a name differently.
    name = statistic_tables.clean_table_field(sanitize_name(key.op_name))
    return key.timestamp_us, key.graph, key.slot, key.side.value, key.stream, name


def _build_program(
    place: ProgramPlace,
    entries: list[Entry],
    rows: dict[_TensorPlace, Figures],
) -> DumpedProgram:
    """Return the program of files and rows; `rows` is emptied."""
    named: list[tuple[_NamedTensor, Figures | None]] = [
        (entry, rows.pop(_make_tensor_place(entry.key), None) if rows else None)
        for entry in entries
    ]
    named.extend((row, row) for row in rows.values())
    named.sort(key=lambda each: (each[0].key.timestamp_us, each[0].key.side, each[0].key.slot))
    tensors = [
        (tensor.key.graph, tensor.op_name, tensor, _build_tensor(tensor, row, seen))
        for seen, (tensor, row) in enumerate(named)
    ]
    return build_program(place, tensors)


class OperatorTyped(Protocol):
    """Object with the type of an operator, which is read once for each call."""

    @property
    def op_type(self) -> str:
        """Type of the operator; the raw type if a manifest has it."""
        ...


def build_program(
    place: ProgramPlace, tensors: Iterable[tuple[int, str, OperatorTyped, DumpedTensor]]
) -> DumpedProgram:
    """Return the program of tensors in execution order, each with the graph and the name of its
    call.
    """
    calls: list[tuple[tuple[int, str], OperatorTyped, _CallTensors]] = []
    latest: dict[tuple[int, str], _CallTensors] = {}
    for graph, op_name, typed, tensor in tensors:
        name, at = (graph, op_name), (tensor.side, tensor.slot)
        held = latest.get(name)
        # If the call already has a tensor at this place, the tensor belongs to the next call with
        # the name.
        if held is None or at in held:
            held = latest[name] = {}
            calls.append((name, typed, held))
        held[at] = tensor
    rank, iteration = place
    called = [
        _build_call(at, name, typed.op_type, list(of.values()))
        for at, (name, typed, of) in enumerate(calls)
    ]
    return DumpedProgram(rank, iteration, tuple(called))


def _build_call(
    position: int, named: tuple[int, str], op_type: str, tensors: list[DumpedTensor]
) -> DumpedCall:
    graph, name = named
    api = api_tree.parse_call_name(name)
    # A gradient without a known full name would otherwise count as its parameter.
    backward = has_scope_prefix(name, GRADIENTS_PREFIX) or (
        api is not None and api.direction == "backward"
    )
    repeated = has_scope_prefix(name, RECOMPUTED_PREFIX) or any(
        tensor.argument.endswith(_RECOMPUTED_SUFFIX) for tensor in tensors
    )
    sides = _split_sides(tensors)
    return DumpedCall(position, op_type, name, *sides, graph, backward, repeated)


def _split_sides(
    tensors: list[DumpedTensor],
) -> tuple[tuple[DumpedTensor, ...], tuple[DumpedTensor, ...]]:
    """Return the inputs and the outputs, each sorted by slot."""
    if len(tensors) == 1:  # as for most parameters and gradients
        alone = (tensors[0],)
        return (alone, ()) if alone[0].side is TensorSide.INPUT else ((), alone)
    tensors.sort(key=lambda tensor: tensor.slot)
    inputs = [tensor for tensor in tensors if tensor.side is TensorSide.INPUT]
    return tuple(inputs), tuple([tensor for tensor in tensors if tensor.side is TensorSide.OUTPUT])


def _build_tensor(tensor: _NamedTensor, row: Figures | None, seen: int) -> DumpedTensor:
    """Return a tensor; fields that its record lacks come from a table, a header or the
    file name.
    """
    key, record = tensor.key, tensor.record
    entry = tensor if isinstance(tensor, Entry) else None
    if record is not None:
        facts = record.argument, record.dtype, record.shape, record.digest
    elif row is not None:
        facts = "", row.dtype, row.shape, ""
    elif entry is not None and entry.described is not None:
        facts = "", entry.described.dtype, entry.described.shape, ""
    else:
        facts = "", key.element.lower(), None, ""
    statistics = _parse_statistics(row) if row is not None else NO_STATISTICS
    of_row = record if entry is None else None
    return DumpedTensor(key.side, key.slot, *facts, entry, statistics, seen, (), None, of_row)


def _parse_statistics(row: Figures) -> Mapping[str, float]:
    found: dict[str, float] = {}
    for title in row.values:
        item = _STATISTIC_ITEMS.get(title)
        if item is not None and (number := row.number(item)) is not None:
            found[item] = number
    return found
