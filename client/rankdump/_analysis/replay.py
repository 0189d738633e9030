"""Replay of dumped calls: finds their arguments by the places of their tensors in an API dump or in
the dump.json of msprobe, loads the inputs, computes the results in float64 with torch, and judges
the dumped results. Needs torch. A function that a dump names is called only if it is in the table
of replayed APIs.

A result of type T is rounded once at its end, by at most u |r| for the unit roundoff u of T, or by
the smallest normal number if T has no smaller ones. The error of the computation before that is
returned together with the value in float64.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from rankdump._analysis.reader.dump import Dump
from rankdump._analysis.reader.foreign_files import read_foreign_file
from rankdump._analysis.reader.msprobe_tree import find_dump_file
from rankdump._analysis.reader.tensor_loader import facts, load
from rankdump._analysis.reader.tree import Entry
from rankdump._core.number_ranges import ranges
from rankdump._core.record import TensorSide
from rankdump._layout.api_tree import ApiCall, parse_call_name, parse_place
from rankdump._layout.msprobe_dump import TensorSlot, UnknownValue, parse_call_arguments
from rankdump.errors import CorruptedError, UnsupportedError

if TYPE_CHECKING:
    from rankdump._frameworks.torch.replayed_apis import ReplayedResult, RoundingUnits

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
    """Positional arguments: numbers, texts, None, lists of these, entries of tensors, and
    `UnknownValue`.
    """
    kwargs: dict[str, Any]
    results: Sequence[Entry]
    """Dumped results, by slot."""
    has_no_texts: bool = False
    """Whether the dump lacks the texts, types and None among the arguments."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about what the dump lacks."""
        return (_NO_TEXTS_NOTE,) if self.has_no_texts else ()


def find_dumped_calls(dump: Dump, name: str) -> list[DumpedApiCall]:
    """Return the calls with this name, one for each rank and iteration that the dump selects.

    CorruptedError if there is no such call, or if it lacks tensors.
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
    """Return the arguments of a call in an API dump, rebuilt from the places of its leaves."""
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
    """Put a leaf at its place in the arguments; the leaves of one list must come in order."""
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


_TF32_UNIT = 2.0**-11
_AUTOCAST_NOTE = "its result is narrower than its inputs: taken as computed under autocast"


@dataclass(frozen=True, slots=True)
class ReplayedOutput:
    """One dumped result of a call, with the verdict on it."""

    place: str
    """Side and slot, such as `output.0`."""
    dtype: str
    shape: tuple[int, ...]
    verdict: ResultVerdict


@dataclass(frozen=True, slots=True)
class CallReplay:
    """Result of replaying one call of a rank in one iteration."""

    name: str
    rank: int
    iteration: int
    outputs: tuple[ReplayedOutput, ...]
    notes: tuple[str, ...]

    @property
    def is_within(self) -> bool:
        """Whether every result is within its rounding error."""
        return all(output.verdict.is_within for output in self.outputs)


def replay_calls(
    dump: Dump, name: str, *, tf32: bool = False, reduced_precision: bool = False
) -> Iterator[CallReplay]:
    """Yield the replay of a call on each rank and in each iteration that the dump selects.

    With `tf32`, operands of float32 products may have been rounded to 11 bits; with
    `reduced_precision`, partial sums may have been rounded to the type of the result.
    CorruptedError if the dump lacks the call or a part of it, UnsupportedError for a call that
    cannot be replayed.
    """
    for call in find_dumped_calls(dump, name):
        yield _replay_call(call, tf32=tf32, reduced_precision=reduced_precision)


def _replay_call(call: DumpedApiCall, *, tf32: bool, reduced_precision: bool) -> CallReplay:
    # Imported on use, because it loads torch.
    from rankdump._frameworks.torch.replayed_apis import CAST_APIS, find_replay_rule

    rule = find_replay_rule(call.call.api) if call.call.kind in _KINDS else None
    where = f"{call.call.name} of rank {call.rank}, iteration {call.iteration}"
    if rule is None:
        raise UnsupportedError(
            f"{where}: calls of {call.call.op_type} are not replayed; docs/comparing.md lists "
            "those that are"
        )
    judged = [entry for entry in call.results if facts(entry).dtype in FLOAT_FORMATS]
    if not judged:
        held = facts(call.results[0]).dtype
        raise UnsupportedError(f"{where}: its result is {held}, which has no rounding to judge")
    dtype, widest = facts(judged[0]).dtype, _find_widest_type(call)
    units = _select_units(dtype, widest, tf32=tf32, reduced_precision=reduced_precision)
    found = _replay_variants(call, rule, units, judged, where)
    is_autocast = _is_narrowed(dtype, widest) and call.call.api not in CAST_APIS
    notes = (*call.notes, *([_AUTOCAST_NOTE] if is_autocast else []), *found.notes)
    return replace(found, notes=notes)


def _find_widest_type(call: DumpedApiCall) -> str:
    """Return the element type with the smallest unit among the inputs; empty if there are none."""
    leaves = _iterate_leaves([*call.args, *call.kwargs.values()])
    types = {facts(each).dtype for each in leaves if isinstance(each, Entry)}
    return min(types & FLOAT_FORMATS.keys(), key=lambda each: FLOAT_FORMATS[each].unit, default="")


def _replay_variants(
    call: DumpedApiCall, rule: Any, units: RoundingUnits, judged: Sequence[Entry], where: str
) -> CallReplay:
    """Return the first replay that is within rounding; if there is none, the replay of the call as
    it is.
    """
    found: list[CallReplay] = []
    errors: list[CorruptedError] = []
    for variant, note in _list_variants(call):
        try:
            results = _compute_results(variant, rule, units, where)
            outputs = tuple(_judge_output(entry, results, where) for entry in judged)
        except CorruptedError as error:
            errors.append(error)
            continue
        place = call.call.name, call.rank, call.iteration
        found.append(CallReplay(*place, outputs, (note,) if note else ()))
        if found[-1].is_within:
            return found[-1]
    if not found:
        raise errors[0]
    return found[0]


def _list_variants(call: DumpedApiCall) -> Iterator[tuple[DumpedApiCall, str]]:
    """Yield a call; if the dump lacks texts, also with each text that a missing
    argument may have.
    """
    from rankdump._frameworks.torch.replayed_apis import TEXT_CHOICES

    yield call, ""
    name, choices = TEXT_CHOICES.get(call.call.api, ("", ()))
    for choice in choices if call.has_no_texts else ():
        note = f"{name}={choice!r} is assumed, with which the result is within its rounding"
        yield replace(call, kwargs={**call.kwargs, name: choice}), note


_KINDS = ("Functional", "Tensor", "Torch")


def _iterate_leaves(values: Iterable[Any]) -> Iterator[Any]:
    """Yield arguments; in place of a list, yield its elements."""
    for value in values:
        if isinstance(value, list):
            yield from _iterate_leaves(cast("list[Any]", value))
        else:
            yield value


def _is_narrowed(dtype: str, widest: str) -> bool:
    return widest in FLOAT_FORMATS and FLOAT_FORMATS[widest].unit < FLOAT_FORMATS[dtype].unit


def _select_units(dtype: str, widest: str, *, tf32: bool, reduced_precision: bool) -> RoundingUnits:
    from rankdump._frameworks.torch.replayed_apis import RoundingUnits

    unit = FLOAT_FORMATS[dtype].unit
    operand = unit if _is_narrowed(dtype, widest) else 0.0
    if tf32 and dtype == "float32":
        operand = _TF32_UNIT
    return RoundingUnits(
        inner=find_inner_unit(dtype),
        result=unit,
        operand=operand,
        partial=unit if reduced_precision else 0.0,
    )


def _compute_results(
    call: DumpedApiCall, rule: Any, units: RoundingUnits, where: str
) -> list[ReplayedResult]:
    from rankdump._frameworks.torch.replayed_apis import CAST_APIS, compute_replay

    leaves = _iterate_leaves([*call.args, *call.kwargs.values()])
    if call.call.api in CAST_APIS:
        call = replace(call, args=call.args[:1], kwargs={})
    elif unknown := next((each for each in leaves if isinstance(each, UnknownValue)), None):
        raise CorruptedError(
            f"{where}: an argument is not in the dump, {unknown.kind or 'of an unknown type'}: "
            "msprobe keeps numbers, texts and tensors"
        )
    args = [_load_argument(value) for value in call.args]
    kwargs = {name: _load_argument(value) for name, value in call.kwargs.items()}
    try:
        return compute_replay(rule, args, kwargs, units)
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError) as error:
        why = " ".join(str(error).split())[:300]
        raise CorruptedError(
            f"{where}: cannot be replayed from the arguments in the dump: {why}"
        ) from None


def _load_argument(value: Any) -> Any:
    if isinstance(value, Entry):
        array = load(value)
        if array.dtype.kind == "c":
            raise UnsupportedError(f"{value.op_name}: complex tensors are not replayed")
        return array
    if isinstance(value, list):
        return [_load_argument(part) for part in cast("list[Any]", value)]
    return value


def _judge_output(entry: Entry, results: Sequence[ReplayedResult], where: str) -> ReplayedOutput:
    known, dumped = facts(entry), load(entry)
    at = entry.key.slot
    if at >= len(results):
        raise CorruptedError(
            f"{where}: the dump has a result {at}, but the replay has {len(results)}"
        )
    value, error = (np.asarray(part) for part in results[at])
    if value.shape != dumped.shape:
        raise CorruptedError(
            f"{where}: the result has shape {dumped.shape}, but the replay {value.shape}"
        )
    verdict = judge_result(dumped, value, error, known.dtype)
    return ReplayedOutput(f"output.{at}", known.dtype, known.shape, verdict)


class FloatFormat(NamedTuple):
    """Rounding errors of an element type."""

    unit: float
    """Half of the distance from 1 to the next larger number."""
    smallest: float
    """Largest rounding error of tiny results; on some devices, smaller results become 0."""
    largest: float


FLOAT_FORMATS: Mapping[str, FloatFormat] = {
    "float64": FloatFormat(2.0**-53, 2.0**-1022, float(np.finfo(np.float64).max)),
    "float32": FloatFormat(2.0**-24, 2.0**-126, float(np.finfo(np.float32).max)),
    "bfloat16": FloatFormat(2.0**-8, 2.0**-126, 3.3895313892515355e38),
    "float16": FloatFormat(2.0**-11, 2.0**-25, 65504.0),
}
"""Element types whose results can be judged."""
_REFERENCE_UNIT = FLOAT_FORMATS["float64"].unit
_NARROW = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ResultVerdict:
    """Distance of one dumped result from its value in float64."""

    count: int
    beyond: int
    """Number of elements whose error exceeds their bound."""
    share: float
    """Largest ratio of an error to its bound; infinite if only one side is not finite."""
    place: tuple[int, ...]
    """Indexes of the element with that ratio; empty for a result without elements."""
    dumped: float
    exact: float
    bound: float

    @property
    def is_within(self) -> bool:
        """Whether all elements are within their bounds."""
        return self.beyond == 0


def find_inner_unit(dtype: str) -> float:
    """Return the unit roundoff of sums whose result has this type; for types of 16 bits, that of
    float32.
    """
    return FLOAT_FORMATS["float32" if dtype in _NARROW else dtype].unit


def judge_result(
    dumped: npt.NDArray[Any], exact: npt.NDArray[Any], error: npt.NDArray[Any], dtype: str
) -> ResultVerdict:
    """Return the verdict on a result with this type; the three arrays have the same shape.

    `error` is the largest error before the last rounding. The value in float64 has an error as
    well, which is smaller by the same factor as its unit.
    """
    form = FLOAT_FORMATS[dtype]
    with np.errstate(all="ignore"):
        own = 1 + _REFERENCE_UNIT / find_inner_unit(dtype)
        bound: npt.NDArray[np.float64] = (
            error * own + (form.unit + 4 * _REFERENCE_UNIT) * np.abs(exact) + form.smallest
        )
        apart = np.abs(np.asarray(dumped, np.float64) - exact)
        same = (np.isnan(dumped) & np.isnan(exact)) | (dumped == exact)
        # For a value beyond the largest number of the type, infinity is the right rounding.
        same |= np.isinf(bound)  # a part of the computation may have any value
        overflown = np.isinf(dumped) & (np.sign(dumped) == np.sign(exact))
        same |= overflown & (np.abs(exact) + bound >= form.largest)
        share: npt.NDArray[np.float64] = np.where(same, 0.0, apart / bound)
        share[np.isnan(share)] = math.inf
    if not share.size:
        return ResultVerdict(0, 0, 0.0, (), math.nan, math.nan, math.nan)
    worst = int(np.argmax(share))
    place: list[int] = [int(index) for index in np.unravel_index(worst, share.shape)]
    return ResultVerdict(
        count=share.size,
        beyond=int((share > 1).sum()),
        share=_get_element(share, worst),
        place=tuple(place),
        dumped=_get_element(dumped, worst),
        exact=_get_element(exact, worst),
        bound=_get_element(bound, worst),
    )


def _get_element(array: npt.NDArray[Any], at: int) -> float:
    return float(array.reshape(-1)[at])
