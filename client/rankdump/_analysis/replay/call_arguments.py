"""Arguments and results of a dumped call of torch's API: from the places of its tensors in an API
dump, or from the dump.json of msprobe. Loads nothing; a tensor is its entry.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from rankdump._analysis.reader.dump import Dump
from rankdump._analysis.reader.foreign_files import read_foreign_file
from rankdump._analysis.reader.msprobe_tree import find_dump_file
from rankdump._analysis.reader.query import ranges
from rankdump._analysis.reader.tensor_loader import load
from rankdump._analysis.reader.tree import Entry
from rankdump._core.record import TensorSide
from rankdump._layout.api_tree import ApiCall, parse_call_name, parse_place
from rankdump._layout.msprobe_dump import TensorSlot, UnknownValue, parse_call_arguments
from rankdump.errors import CorruptedError

_LONGEST_LIST = 1 << 16
_MAX_NAMED = 4
_NO_TEXTS_NOTE = (
    "texts, types and None are not in an API dump: such arguments are taken as their defaults"
)


@dataclass(frozen=True, slots=True)
class DumpedApiCall:
    """One call of a rank in one iteration."""

    call: ApiCall
    rank: int
    iteration: int
    args: Sequence[Any]
    """Numbers, texts, None, lists of these, entries of tensors, and `UnknownValue`."""
    kwargs: dict[str, Any]
    results: Sequence[Entry]
    """By slot."""
    has_no_texts: bool = False
    """Whether texts, types and None among its arguments are not in the dump."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about what the dump does not hold."""
        return (_NO_TEXTS_NOTE,) if self.has_no_texts else ()


def find_dumped_calls(dump: Dump, name: str) -> list[DumpedApiCall]:
    """Return the calls of a name, one for each rank and iteration that the dump selects.

    CorruptedError where there is none, or not with its tensors.
    """
    entries = [
        entry
        for entry in dump.tensors(operator=_escape_glob(name))
        if name in (entry.op_name, entry.key.op_name)
    ]
    if not entries:
        raise CorruptedError(_explain_missing_call(dump, name))
    call = parse_call_name(entries[0].op_name)
    if call is None or call.direction != "forward":
        raise CorruptedError(
            f"{dump.root}: {name} is no forward call of torch's API: such calls, as "
            "Functional_linear_0_forward, are in API dumps and in msprobe's of level L1 or mix"
        )
    by_place: defaultdict[tuple[int, int], list[Entry]] = defaultdict(list)
    for entry in entries:
        by_place[entry.key.rank, entry.key.iteration].append(entry)
    return [_read_call(dump, call, own) for _, own in sorted(by_place.items())]


def _escape_glob(name: str) -> str:
    return name.replace("[", "[[]").replace("*", "[*]").replace("?", "[?]")


def _explain_missing_call(dump: Dump, name: str) -> str:
    rows = [row for row in dump.statistics() if name in (row.op_name, row.key.op_name)]
    if rows:
        ranks = ranges(row.key.rank for row in rows)
        return f"{dump.root}: of {name} on rank {ranks} the dump has statistics, but no tensors"
    calls = [each for each in dump.operators if parse_call_name(each) is not None]
    shown = ", ".join(calls[:_MAX_NAMED]) or "none"
    more = f" and {len(calls) - _MAX_NAMED} more" if len(calls) > _MAX_NAMED else ""
    return f"{dump.root}: no call {name}; calls of torch's API: {shown}{more}"


def _read_call(dump: Dump, call: ApiCall, entries: Sequence[Entry]) -> DumpedApiCall:
    first = entries[0]
    inputs = [entry for entry in entries if entry.key.side is TensorSide.INPUT]
    results = [entry for entry in entries if entry.key.side is TensorSide.OUTPUT]
    if not results:
        raise CorruptedError(f"{dump.root}: the dump has no result of {first.op_name}")
    results.sort(key=lambda entry: (entry.key.slot, entry.key.timestamp_us))
    place = call, first.key.rank, first.key.iteration
    described = find_dump_file(first)
    if described is not None:
        found = parse_call_arguments(read_foreign_file(described), first.key.op_name)
        if found is not None:
            slots = {entry.key.slot: entry for entry in inputs}
            args = [_fill_slots(each, slots, first) for each in found[0]]
            kwargs = {key: _fill_slots(each, slots, first) for key, each in found[1].items()}
            return DumpedApiCall(*place, args, kwargs, results)
    args, kwargs = _join_places(inputs)
    return DumpedApiCall(*place, args, kwargs, results, has_no_texts=True)


def _fill_slots(value: Any, slots: dict[int, Entry], call: Entry) -> Any:
    if isinstance(value, TensorSlot):
        if value.slot not in slots:
            raise CorruptedError(
                f"{call.op_name}: the file of input {value.slot} is not in the dump"
            )
        return slots[value.slot]
    if isinstance(value, list):
        return [_fill_slots(part, slots, call) for part in cast("list[Any]", value)]
    return UnknownValue("a mapping") if isinstance(value, dict) else value


def _join_places(inputs: Sequence[Entry]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call in an API dump from the places of its leaves."""
    args: dict[int, Any] = {}
    kwargs: dict[str, Any] = {}
    for entry in inputs:
        text = entry.record.argument if entry.record is not None else entry.key.argument
        place = parse_place(text)
        numbers = [part for part in place.path.split(".") if part] if place is not None else []
        if place is None or not numbers or not all(map(str.isdecimal, numbers)):
            raise CorruptedError(f"{entry.relative}: {text!r} is no place among arguments")
        value = load(entry).item() if place.scalar else entry
        word = place.word.partition(".")[0]
        if word and not word.isdecimal():
            _put_value(kwargs, word, numbers[1:], value, entry)
        else:
            _put_value(args, int(numbers[0]), numbers[1:], value, entry)
    count = max(args, default=-1) + 1
    if count > _LONGEST_LIST:
        raise CorruptedError(f"{inputs[0].op_name}: argument {count - 1:,} of a call")
    return [args.get(at) for at in range(count)], kwargs


def _put_value(
    places: dict[Any, Any], key: str | int, inner: Sequence[str], value: Any, entry: Entry
) -> None:
    """Put a leaf where it belongs; those of one list come in their order."""
    if not inner:
        places[key] = value
        return
    parts = places.setdefault(key, [])
    if not isinstance(parts, list) or int(inner[0]) != len(cast("list[Any]", parts)):
        raise CorruptedError(
            f"{entry.op_name}: argument {key} has leaves that are not in the dump: dump with "
            "filter_data=False, which keeps numbers and all tensors"
        )
    parts.append(value)
