"""What a report says of where something starts: one sentence each. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rankdump.contract.key import Side
from rankdump.contract.layout.api_name import LAYER, call_of
from rankdump.contract.layout.mindspore_sync import PARAMETER
from rankdump.diff.origin_rows import Question, bad, tensor_of
from rankdump.diff.values import TYPES, Row, Verdict

NO_INPUTS = "no inputs were dumped: what comes between two calls cannot be told from a call"
NO_OUTPUTS = "no outputs were dumped: it happened in this call or on the way to the next one"
LATER_INPUTS = "an input of it is bad as well, though it was seen later"


def made(rows: Sequence[Row], inside: Row | None, question: Question) -> str:
    """Say what a call did whose inputs are good; `inside` is where it showed first, if elsewhere.

    The rows are those of the call.
    """
    inputs = [row for row in rows if _is(row, Side.INPUT)]
    output = next(row for row in rows if _is(row, Side.OUTPUT) and bad(row, question))
    text = f"{_kind(output)}{_good(inputs, question)}{_wrong(output, question)}"
    if inside is not None and not inside.backward:
        text += f"; it shows first in the inputs of {name_of(inside)}, and no call made it"
    return text


def in_layer(row: Row, before: Row) -> str:
    """Say which layer a call of a module's own API is: its mark stands right before it."""
    call, mark = call_of(name_of(row)), call_of(name_of(before))
    if call is None or mark is None or mark.kind != LAYER or call.kind != "NN":
        return ""
    return f"; it is the layer {mark.api}"


def from_outside(row: Row, question: Question) -> str:
    """Say that a bad input was made by nothing that was dumped."""
    return (
        f"its inputs {_already(question)}: they come from outside what was dumped: "
        f"{_wrong(row, question)}"
    )


def both_sides(rows: Sequence[Row], question: Question) -> str:
    """Say what is bad of a call whose inputs and outputs both are."""
    wrong = [row for row in rows if bad(row, question)]
    return "; ".join(_wrong(row, question) for row in wrong[:2])


def right_before(row: Row, following: Row) -> str:
    """Say that a call stands before the first that has bad inputs."""
    return f"it stands right before {name_of(following)}, whose inputs are the first bad ones"


def only_one_side(alone: Row, row: Row, question: Question) -> str:
    """Say that only one side made a call, and what follows it."""
    which = "a" if alone.name_a else "b"
    return f"only {which} has this call; behind it {_wrong(row, question)} ({name_of(row)})"


def several_alone(count: int, row: Row) -> str:
    """Say that several calls are possible."""
    return f"{count} calls before {name_of(row)} have no partner"


def unknown_inputs(rows: Sequence[Row], question: Question) -> str:
    """Say which inputs nobody could judge."""
    places = ", ".join(row.place for row in rows[:3])
    if question.kind == "nonfinite":
        return f"whether {places} was finite is not known"
    return f"{places} could not be compared"


def also_differs(row: Row, *, after: bool) -> str:
    """Say that a weight of the suspected call differs too."""
    when = " (read after the step)" if after else ""
    return f"; its parameter {row.name_a or row.name_b} differs too{_amount(row)}{when}"


def other_ranks(ranks: Sequence[int]) -> str:
    """Say on which other ranks it is the same."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"; the same on {noun} {shown}"


def sent_by(rank: int) -> str:
    """Say which rank it came from."""
    return f"; it came from rank {rank}"


def name_of(row: Row) -> str:
    """Return what a call is called here."""
    return row.name_a or row.name_b


def _is(row: Row, side: Side) -> bool:
    tensor = row.pair.a or row.pair.b
    return tensor is not None and tensor.side is side


def _kind(row: Row) -> str:
    if row.op_type != PARAMETER:
        return ""
    return "gradient of a parameter: " if row.backward else "parameter, read after the step: "


def _good(inputs: Sequence[Row], question: Question) -> str:
    if not inputs:
        return ""
    if question.kind == "nonfinite":
        known = not question.harmless and all(bad(row, question) is False for row in inputs)
        return "its inputs are finite, and " if known else ""
    return "its inputs agree, and " if all(r.outcome.verdict.agrees for r in inputs) else ""


def _already(question: Question) -> str:
    return "differ already" if question.kind == "difference" else "are not finite already"


def _wrong(row: Row, question: Question) -> str:
    outcome = row.outcome
    if question.kind == "nonfinite":
        return f"{row.place} holds NaN or infinity{_counted(row, question)}"
    if outcome.verdict is Verdict.SHAPE:
        a, b = row.pair.a, row.pair.b
        shapes = f": {a.shape} and {b.shape}" if a and b and a.shape and b.shape else ""
        return f"{row.place} has another shape{shapes}"
    if outcome.verdict is Verdict.NAN:
        count = outcome.measures.nonfinite_apart if outcome.measures else 0
        places = f" at {count:,} {'place' if count == 1 else 'places'}" if count else ""
        return f"{row.place} is NaN or infinite on one side alone{places}"
    return f"{row.place} differs{_amount(row)}{_types(row)}"


def _types(row: Row) -> str:
    found = next((each for each in row.outcome.findings if each.startswith(TYPES)), "")
    return f" ({found})" if found else ""


def _amount(row: Row) -> str:
    measures = row.outcome.measures
    if measures is not None:
        return f" by at most {measures.max_absolute:.4g}"
    figures = {name: value for name, value in row.outcome.figures.items() if value}
    if figures:
        name = max(figures, key=lambda each: abs(figures[each]))
        return f" in its {name} by {figures[name]:.4g}"
    return ""


def _counted(row: Row, question: Question) -> str:
    measures, tensor = row.outcome.measures, tensor_of(row, question)
    if measures is None or tensor is None:
        return ""
    count = measures.nonfinite_b if question.side == "b" else measures.nonfinite_a
    return f", {count} of {measures.count} elements"
