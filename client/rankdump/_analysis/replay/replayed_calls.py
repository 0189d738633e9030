"""Replay of dumped calls: loads their inputs, computes their results in float64 with torch, and
judges what was dumped. Needs torch. What a dump names is called only if the table has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rankdump._analysis.reader.dump import Dump
from rankdump._analysis.reader.tensor_loader import facts, load
from rankdump._analysis.reader.tree import Entry
from rankdump._analysis.replay.call_arguments import DumpedApiCall, find_dumped_calls
from rankdump._analysis.replay.result_bounds import (
    FLOAT_FORMATS,
    ResultVerdict,
    find_inner_unit,
    judge_result,
)
from rankdump._layout.msprobe_arguments import UnknownValue
from rankdump.errors import CorruptedError, UnsupportedError

if TYPE_CHECKING:
    from rankdump._frameworks.torch.replayed_apis import ReplayedResult, RoundingUnits

_TF32_UNIT = 2.0**-11
_AUTOCAST_NOTE = "its result is narrower than its inputs: taken as computed under autocast"


@dataclass(frozen=True, slots=True)
class ReplayedOutput:
    """One result of a call, as it was dumped."""

    place: str
    """`output.0`"""
    dtype: str
    shape: tuple[int, ...]
    verdict: ResultVerdict


@dataclass(frozen=True, slots=True)
class CallReplay:
    """Replay of one call of a rank in one iteration."""

    name: str
    rank: int
    iteration: int
    outputs: tuple[ReplayedOutput, ...]
    notes: tuple[str, ...]

    @property
    def is_within(self) -> bool:
        """Whether every result is within its rounding."""
        return all(output.verdict.is_within for output in self.outputs)


def replay_calls(
    dump: Dump, name: str, *, tf32: bool = False, reduced_precision: bool = False
) -> Iterator[CallReplay]:
    """Yield the replay of a call on each rank and in each iteration that the dump selects.

    With `tf32`, operands of float32 products may have been rounded to 11 bits; with
    `reduced_precision`, partial sums to the type of the result. CorruptedError where the dump lacks
    the call or a part of it, UnsupportedError for a call that is not replayed.
    """
    for call in find_dumped_calls(dump, name):
        yield _replay_call(call, tf32=tf32, reduced_precision=reduced_precision)


def _replay_call(call: DumpedApiCall, *, tf32: bool, reduced_precision: bool) -> CallReplay:
    # Imported on use: it loads torch.
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
    """Return the element type of the inputs with the smallest unit; empty without any."""
    types = {facts(entry).dtype for entry in _list_entries([*call.args, *call.kwargs.values()])}
    return min(types & FLOAT_FORMATS.keys(), key=lambda each: FLOAT_FORMATS[each].unit, default="")


def _replay_variants(
    call: DumpedApiCall, rule: Any, units: RoundingUnits, judged: Sequence[Entry], where: str
) -> CallReplay:
    """Return the first replay that is within rounding, else that of the call as it is."""
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
    """Yield a call, and where the dump has no texts also with each other text that it may have."""
    from rankdump._frameworks.torch.replayed_apis import TEXT_CHOICES

    yield call, ""
    name, choices = TEXT_CHOICES.get(call.call.api, ("", ()))
    for choice in choices if call.has_no_texts else ():
        note = f"{name}={choice!r} is assumed, with which the result is within its rounding"
        yield replace(call, kwargs={**call.kwargs, name: choice}), note


_KINDS = ("Functional", "Tensor", "Torch")


def _list_entries(values: Sequence[Any]) -> Iterator[Entry]:
    for value in values:
        if isinstance(value, Entry):
            yield value
        elif isinstance(value, list):
            yield from _list_entries(cast("list[Any]", value))


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

    given = [*call.args, *call.kwargs.values()]
    if call.call.api in CAST_APIS:
        call = replace(call, args=call.args[:1], kwargs={})
    elif unknown := next(_find_unknown(given), None):
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


def _find_unknown(values: Sequence[Any]) -> Iterator[UnknownValue]:
    for value in values:
        if isinstance(value, UnknownValue):
            yield value
        elif isinstance(value, list):
            yield from _find_unknown(cast("list[Any]", value))


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
