"""Origin of a difference, or of NaN and infinity, on one rank: the first call that turned good
inputs into bad outputs, with the sentences that describe it. Pure.

For `difference`, a tensor is bad when it does not agree with its partner; for `nonfinite`, when it
has NaN or infinity. The search starts at the first bad tensor in the order in which tensors were
seen. Its origin is a call with good inputs and bad outputs that was running at that time; among
nested calls, the one that ended first, which is the innermost. If there was no such call, the
tensor came from outside the dump, or through a call that only one side made.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal, TypeAlias

from rankdump._analysis.compare.call_names import parse_module_path
from rankdump._analysis.compare.error_tolerance import NORMAL_RATIO
from rankdump._analysis.compare.report import (
    CONSTANTS_ITERATION,
    DTYPE_FINDING_PREFIX,
    FACTOR_FINDING_PREFIX,
    REPLICA_FINDING_PREFIX,
    ComparisonRow,
    DumpedTensor,
    OriginKind,
    TensorVerdict,
)
from rankdump._analysis.compare.report_summary import get_row_error, get_severity
from rankdump._core.record import TensorSide
from rankdump._core.units import format_count
from rankdump._layout.api_tree import LAYER_KIND, parse_call_name
from rankdump._layout.tree_paths import PARAMETER_OP_TYPE

_TOLD_PREFIXES = (DTYPE_FINDING_PREFIX, REPLICA_FINDING_PREFIX, FACTOR_FINDING_PREFIX)
_APART_VERDICTS = (
    TensorVerdict.DIFFERENT,
    TensorVerdict.SUSPICIOUS,
    TensorVerdict.NAN,
    TensorVerdict.SHAPE,
)
_UNDECIDED_VERDICTS = (TensorVerdict.UNMATCHED, TensorVerdict.UNREADABLE, TensorVerdict.UNKNOWN)

NO_INPUTS_REASON = (
    "no inputs were dumped: a change between two calls cannot be told from one in a call"
)
NO_OUTPUTS_REASON = "no outputs were dumped: it started in this call or between it and the next one"
GROWING_ERROR_REASON = "no operator alone adds more than expected: the error grows over several"
LATER_INPUTS_REASON = "one of its inputs is bad as well, but was recorded later"
_RankIteration: TypeAlias = "tuple[int, int]"
_MAX_MASK_READERS = 2
"""Largest number of calls that are examined to tell a mask from bad data that is not finite."""
_MAX_UNMATCHED_CALLS = 8
"""Largest number of unmatched calls that are named."""


@dataclass(frozen=True, slots=True)
class OriginQuestion:
    """Kind of origin that is searched for, and the dump that is searched."""

    kind: OriginKind
    side: Literal["", "a", "b"] = ""
    """Dump that is searched for non-finite values; empty for `difference`."""
    harmless: frozenset[str] = frozenset()
    """Digests of tensors that are not finite on purpose, such as attention masks."""

    def select(self, row: ComparisonRow) -> DumpedTensor | None:
        """Return the tensor that the question is about; for a difference, the tensor of side a."""
        return row.pair.b if self.side == "b" else row.pair.a

    def is_bad(self, row: ComparisonRow) -> bool | None:
        """Return whether the tensor of a row is bad; None when this is unknown."""
        outcome = row.outcome
        if self.kind == "difference":
            return None if outcome.verdict in _UNDECIDED_VERDICTS else not outcome.verdict.agrees
        tensor = self.select(row)
        if tensor is None or tensor.digest in self.harmless:
            return False
        return outcome.nonfinite_b if self.side == "b" else outcome.nonfinite_a

    def list_unknown(self, rows: Iterable[ComparisonRow]) -> tuple[ComparisonRow, ...]:
        """Return the rows for which `is_bad` does not know the answer."""
        return tuple(row for row in rows if self.is_bad(row) is None)

    def get_order(self, row: ComparisonRow) -> int:
        """Return the position of a row's tensor in the order in which the tensors of its program
        were seen.
        """
        tensor = self.select(row)
        return tensor.seen_order if tensor is not None else 0


DIFFERENCE_QUESTION = OriginQuestion("difference")
NONFINITE_QUESTIONS = (OriginQuestion("nonfinite", "a"), OriginQuestion("nonfinite", "b"))


@dataclass(frozen=True, slots=True, eq=False)
class CallRows:
    """A pair of calls with the rows of its tensors, compared by identity."""

    rows: tuple[ComparisonRow, ...]

    @property
    def first_row(self) -> ComparisonRow:
        """The first row; names and positions are the same in all rows."""
        return self.rows[0]

    @property
    def inputs(self) -> tuple[ComparisonRow, ...]:
        """The rows of the call's inputs."""
        return tuple(row for row in self.rows if _get_side(row) is TensorSide.INPUT)

    @property
    def outputs(self) -> tuple[ComparisonRow, ...]:
        """The rows of the call's outputs."""
        return tuple(row for row in self.rows if _get_side(row) is TensorSide.OUTPUT)


def _get_side(row: ComparisonRow) -> TensorSide | None:
    tensor = row.pair.a or row.pair.b
    return tensor.side if tensor is not None else None


def _describe_faulty_call(
    call: CallRows, question: OriginQuestion, inside: ComparisonRow | None = None
) -> str:
    """Describe a call with good inputs; `inside` is the row of the inner call in which the
    difference first shows.
    """
    output = next(row for row in call.outputs if question.is_bad(row))
    text = _describe_parameter_kind(output) + _describe_good_inputs(call.inputs, question)
    text += _describe_bad_tensor(output, question)
    if inside is not None and not inside.backward:
        text += f"; it first shows in the inputs of {inside.name}, and no recorded call produced it"
    return text


def _describe_layer(row: ComparisonRow, before: ComparisonRow) -> str:
    """Name the layer that made a call, whose mark comes directly before the call; empty if there is
    no mark.
    """
    call, mark = parse_call_name(row.name), parse_call_name(before.name)
    if call is None or mark is None or mark.kind != LAYER_KIND or call.kind != "NN":
        return ""
    return f"; it is the layer {mark.api}"


def _describe_parameter_kind(row: ComparisonRow) -> str:
    if row.op_type != PARAMETER_OP_TYPE:
        return ""
    return "gradient of a parameter: " if row.backward else "parameter, read after the step: "


def _describe_good_inputs(inputs: Sequence[ComparisonRow], question: OriginQuestion) -> str:
    if not inputs:
        return ""
    if question.kind == "nonfinite":
        known = not question.harmless and all(question.is_bad(row) is False for row in inputs)
        return "its inputs are finite, and " if known else ""
    return "its inputs agree, and " if all(row.agrees for row in inputs) else ""


def _describe_bad_tensor(row: ComparisonRow, question: OriginQuestion) -> str:
    outcome = row.outcome
    if question.kind == "nonfinite":
        return f"{row.place_name} holds NaN or infinity{_describe_nonfinite_count(row, question)}"
    if outcome.verdict is TensorVerdict.SHAPE:
        a, b = row.pair.a, row.pair.b
        shapes = f": {a.shape} and {b.shape}" if a and b and a.shape and b.shape else ""
        why = "" if shapes or not outcome.findings else f" ({outcome.findings[0]})"
        return f"{row.place_name} has another shape{shapes}{why}"
    if outcome.verdict is TensorVerdict.NAN:
        count = outcome.measures.nonfinite_apart if outcome.measures else 0
        places = f" at {format_count(count, 'place')}" if count else ""
        return f"{row.place_name} is NaN or infinite on one side alone{places}"
    told = next((each for each in outcome.findings if each.startswith(_TOLD_PREFIXES)), "")
    remark = f" ({told})" if told else ""
    return f"{row.place_name} differs{_describe_amount(row)}{remark}"


def _describe_amount(row: ComparisonRow) -> str:
    measures = row.outcome.measures
    if measures is not None:
        return f" by at most {measures.max_absolute:.4g}"
    differences = {
        name: value for name, value in row.outcome.statistic_differences.items() if value
    }
    if differences:
        name = max(differences, key=lambda each: abs(differences[each]))
        return f" in its {name} by {differences[name]:.4g}"
    return ""


def _describe_nonfinite_count(row: ComparisonRow, question: OriginQuestion) -> str:
    measures, tensor = row.outcome.measures, question.select(row)
    if measures is None or tensor is None:
        return ""
    count = measures.nonfinite_b if question.side == "b" else measures.nonfinite_a
    return f", {count} of {measures.count} elements"


@dataclass(frozen=True, slots=True)
class RankOrigin:
    """Origin of the difference, or of NaN and infinity, on one rank."""

    question: OriginQuestion
    calls: tuple[CallRows, ...]
    """Calls that may be the origin, the likeliest first."""
    reasons: tuple[str, ...]
    """One reason for each call."""
    ambiguity: str = ""
    """Reason why the origin is not certain."""
    is_outside: bool = False
    """Whether the inputs are bad already, and no dumped call produced them."""
    unknown: tuple[ComparisonRow, ...] = ()
    """Rows whose tensors have to be read to decide."""

    @property
    def likeliest_row(self) -> ComparisonRow:
        """First row of the likeliest call."""
        return self.calls[0].first_row

    @property
    def error_key(self) -> tuple[int, float]:
        """Sort key of how bad the tensor is that the reason describes: the verdict,
        then the error.
        """
        wrong = [row for row in self.calls[0].rows if self.question.is_bad(row)]
        outputs = [row for row in wrong if _get_side(row) is TensorSide.OUTPUT]
        row = (outputs or wrong or self.calls[0].rows)[0]
        error = get_row_error(row)
        return -get_severity(row), 0.0 if math.isnan(error) else error

    @property
    def iteration_key(self) -> tuple[bool, int]:
        """Sort key of the iteration; constants come last."""
        return _make_iteration_key(self.likeliest_row.iteration)


def _make_iteration_key(iteration: int) -> tuple[bool, int]:
    return iteration == CONSTANTS_ITERATION, iteration


def find_rank_origins(rows: Sequence[ComparisonRow], question: OriginQuestion) -> list[RankOrigin]:
    """Return the origin on each rank that has one in the first iteration with an origin."""
    if not any(question.is_bad(row) for row in rows):
        return []
    programs = _group_programs(rows)
    found: dict[int, RankOrigin] = {}
    for rank, iteration in sorted(programs, key=lambda place: _make_iteration_key(place[1])):
        if rank not in found:
            answer = _find_program_origin(programs[rank, iteration], question)
            if answer is not None:
                found[rank] = answer
    return [found[rank] for rank in sorted(found)]


def _find_program_origin(steps: Sequence[CallRows], question: OriginQuestion) -> RankOrigin | None:
    """Return the origin in one program; None if nothing is bad.

    A mask from outside that has infinities is skipped if a call that read it wrote only finite
    numbers.
    """
    found = _search_program(steps, question)
    while found is not None and found.is_outside and question.kind == "nonfinite":
        tensor = question.select(next(filter(question.is_bad, found.calls[0].inputs)))
        digest = tensor.digest if tensor is not None else ""
        readers = _find_readers(steps, digest, question) if digest else []
        known = (map(question.is_bad, step.outputs) for step in readers)
        if not any(all(bad is False for bad in outputs) for outputs in known):
            outputs = (row for step in readers[:_MAX_MASK_READERS] for row in step.outputs)
            return replace(found, unknown=question.list_unknown(outputs))
        question = replace(question, harmless=question.harmless | {digest})
        found = _search_program(steps, question)
    return found


def _find_readers(
    steps: Sequence[CallRows], digest: str, question: OriginQuestion
) -> list[CallRows]:
    """Return the calls that read a tensor, in the order in which they ended."""
    found = [
        step
        for step in steps
        if step.outputs
        and any(t and t.digest == digest for t in (question.select(r) for r in step.inputs))
    ]
    return sorted(found, key=lambda step: max(question.get_order(row) for row in step.rows))


def _search_program(steps: Sequence[CallRows], question: OriginQuestion) -> RankOrigin | None:
    wrong = [
        (question.get_order(row), step, row)
        for step in steps
        for row in step.rows
        if question.is_bad(row)
    ]
    if not wrong:
        return None
    when, step, row = min(wrong, key=lambda each: each[0])
    maker = _find_maker([step for _, step, _ in wrong], when, question)
    if _get_side(row) is TensorSide.INPUT or maker is None:
        alone = _find_unmatched_before(steps, step, row)
        if alone:
            return _build_unmatched_origin(alone, row, question)
    if maker is None:
        return _build_outside_origin(steps, step, row, question)
    if question.kind == "difference" and _find_gain(maker, steps) <= NORMAL_RATIO:
        return _build_gain_origin(steps, maker, [each for _, each, _ in wrong])
    return _build_maker_origin(steps, maker, step, question)


def _group_programs(rows: Iterable[ComparisonRow]) -> dict[_RankIteration, list[CallRows]]:
    """Return the calls of each program with their rows, in execution order."""
    found: defaultdict[_RankIteration, defaultdict[int, list[ComparisonRow]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in rows:
        found[row.place][row.position].append(row)
    return {
        place: [CallRows(tuple(program[at])) for at in sorted(program)]
        for place, program in found.items()
    }


def _find_maker(wrong: Iterable[CallRows], when: int, question: OriginQuestion) -> CallRows | None:
    """Return the call with good inputs and bad outputs that was running at a time and
    ended first.
    """
    best: tuple[int, CallRows] | None = None
    for step in wrong:
        ends = [question.get_order(row) for row in step.outputs if question.is_bad(row)]
        if not ends or any(map(question.is_bad, step.inputs)):
            continue
        begin = min(question.get_order(row) for row in step.rows if question.select(row))
        if begin <= when and (best is None or min(ends) < best[0]):
            best = min(ends), step
    return best[1] if best is not None else None


def _find_gain(step: CallRows, steps: Iterable[CallRows]) -> float:
    """Return by which factor a call multiplies the error, if errors are measured in those of noise
    runs or of rounding.

    A call without inputs is compared with the largest normal error that was seen before it.
    """
    outputs = [row for row in step.outputs if not row.agrees]
    if not outputs or any(row.outcome.error_ratio is None for row in outputs):
        return math.inf
    inputs: Sequence[ComparisonRow] = step.inputs
    if not inputs:
        before = min(DIFFERENCE_QUESTION.get_order(row) for row in outputs)
        inputs = [
            row
            for each in steps
            for row in each.rows
            if DIFFERENCE_QUESTION.get_order(row) < before and row.agrees
        ]
    return _find_largest_ratio(outputs) / max(1.0, _find_largest_ratio(inputs))


def _find_largest_ratio(rows: Iterable[ComparisonRow]) -> float:
    return max((row.outcome.error_ratio or 0.0 for row in rows), default=0.0)


def _find_unmatched_before(
    steps: Sequence[CallRows], step: CallRows, row: ComparisonRow
) -> list[CallRows]:
    """Return the nearest unmatched calls before a call, the last one first.

    If matched calls are in between, one of the unmatched calls must have an output with the same
    shape.
    """
    before = steps[: steps.index(step)][::-1]
    agreeing = list(takewhile(lambda each: each.first_row.rule, before))
    alone = list(takewhile(lambda each: not each.first_row.rule, before[len(agreeing) :]))
    return alone if not agreeing or any(_may_have_made(each, row) for each in alone) else []


def _may_have_made(alone: CallRows, row: ComparisonRow) -> bool:
    """Return whether an unmatched call has an output with the shape of the row's tensor on that
    side.
    """
    wanted = row.pair.a if alone.first_row.name_a else row.pair.b
    made = [each.pair.a or each.pair.b for each in alone.outputs]
    return wanted is not None and any(each and each.shape == wanted.shape for each in made)


def _build_unmatched_origin(
    alone: list[CallRows], row: ComparisonRow, question: OriginQuestion
) -> RankOrigin:
    why = f"{len(alone)} calls before {row.name} have no partner"
    calls = tuple(alone[:_MAX_UNMATCHED_CALLS])
    after = f"after it {_describe_bad_tensor(row, question)} ({row.name})"
    sides = ("a" if each.first_row.name_a else "b" for each in calls)
    reasons = tuple(f"only {side} has this call; {after}" for side in sides)
    return RankOrigin(question, calls, reasons, "" if len(alone) == 1 else why)


def _build_outside_origin(
    steps: Sequence[CallRows], step: CallRows, row: ComparisonRow, question: OriginQuestion
) -> RankOrigin:
    if _get_side(row) is TensorSide.OUTPUT:
        wrong = [each for each in step.rows if question.is_bad(each)]
        bad = "; ".join(_describe_bad_tensor(each, question) for each in wrong[:2])
        return RankOrigin(question, (step,), (bad,), LATER_INPUTS_REASON)
    how = "differ already" if question.kind == "difference" else "are already not finite"
    bad = _describe_bad_tensor(row, question)
    reason = f"its inputs {how}: they come from outside what was dumped: {bad}"
    if any(each.outputs for each in steps):
        return RankOrigin(question, (step,), (reason,), is_outside=True)
    at = steps.index(step)
    before = steps[max(at - 1, 0) : at]
    near = f"it ran right before {row.name}, whose inputs are the first bad ones"
    reasons = (*(near for _ in before), reason)
    return RankOrigin(question, (*before, step), reasons, NO_OUTPUTS_REASON, is_outside=not before)


def _build_maker_origin(
    steps: Sequence[CallRows], maker: CallRows, step: CallRows, question: OriginQuestion
) -> RankOrigin:
    unknown = question.list_unknown(maker.inputs)
    inside = step.first_row if step is not maker else None
    reason = _describe_faulty_call(maker, question, inside)
    reason += _describe_layer(maker.first_row, steps[steps.index(maker) - 1].first_row)
    why = ""
    if unknown:
        places = ", ".join(row.place_name for row in unknown[:3])
        why = f"{places} could not be compared"
        if question.kind == "nonfinite":
            why = f"whether {places} was finite is not known"
    elif not any(each.inputs for each in steps):
        why = NO_INPUTS_REASON
    return RankOrigin(question, (maker,), (reason,), why, unknown=unknown)


def _build_gain_origin(
    steps: Sequence[CallRows], maker: CallRows, wrong: Iterable[CallRows]
) -> RankOrigin:
    """Return the first call that adds an error of its own. It is used if the first bad outputs,
    which are those of `maker`, are only the sum of normal errors.
    """
    found = [
        (max(DIFFERENCE_QUESTION.get_order(row) for row in step.rows), step)
        for step in {id(step): step for step in wrong}.values()
        if _find_gain(step, steps) > NORMAL_RATIO and step.outputs
    ]
    if not found:
        reason = _describe_faulty_call(maker, DIFFERENCE_QUESTION)
        return RankOrigin(DIFFERENCE_QUESTION, (maker,), (reason,), GROWING_ERROR_REASON)
    _, step = min(found, key=lambda each: each[0])
    reason = _describe_faulty_call(step, DIFFERENCE_QUESTION)
    if not all(row.agrees for row in step.inputs):
        ratios = _find_largest_ratio(step.inputs), _find_largest_ratio(step.outputs)
        reason += (
            f"; the errors of its inputs are {ratios[0]:.3g} times the expected ones, those of its "
            f"outputs {ratios[1]:.3g} times"
        )
    return RankOrigin(DIFFERENCE_QUESTION, (step,), (reason,))


def describe_differing_weights(found: RankOrigin, rows: Iterable[ComparisonRow]) -> str:
    """Return a sentence about the weights of the likeliest call; empty if the weights agree.

    A tree has parameters as they were after the step, so a call used the parameters of the
    iteration before. If these are missing, those of the same iteration are named, with a remark.
    """
    first = found.likeliest_row
    path = ".".join(parse_module_path(first.name))
    if not path or first.op_type == PARAMETER_OP_TYPE or found.question.kind != "difference":
        return ""
    apart = [
        row
        for row in rows
        if row.op_type == PARAMETER_OP_TYPE
        and row.outcome.verdict in _APART_VERDICTS
        and row.rank == first.rank
        and not row.backward
        and row.name.rpartition(".")[0] == path
    ]
    for iteration in (first.iteration - 1, CONSTANTS_ITERATION, first.iteration):
        weight = next((row for row in apart if row.iteration == iteration), None)
        if weight is not None:
            amount = _describe_amount(_find_widest_row(weight, rows))
            when = " (read after the step)" if iteration == first.iteration else ""
            return f"; its parameter {weight.name} differs too{amount}{when}"
    return ""


def _find_widest_row(weight: ComparisonRow, rows: Iterable[ComparisonRow]) -> ComparisonRow:
    """Return the row of a weight on the rank on which it differs most."""
    key = weight.iteration, weight.name, weight.slot_name
    same = (
        row
        for row in rows
        if row.op_type == PARAMETER_OP_TYPE
        and (row.iteration, row.name, row.slot_name) == key
        and row.outcome.verdict is weight.outcome.verdict
    )
    return max(
        same, key=lambda row: row.outcome.measures.max_absolute if row.outcome.measures else 0.0
    )
