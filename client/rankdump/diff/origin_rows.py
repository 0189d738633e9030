"""What a row says to the question where something starts: is it bad, and when was it seen. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rankdump.diff.values import OriginKind, Row, Tensor, Verdict

_UNDECIDED = (Verdict.UNMATCHED, Verdict.UNREADABLE, Verdict.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Question:
    """What is looked for, and in which dump."""

    kind: OriginKind
    side: Literal["", "a", "b"] = ""
    """Of `nonfinite`."""
    harmless: frozenset[str] = frozenset()
    """Digests of tensors that hold NaN or infinity on purpose, such as the masks of attention."""


DIFFERENCE = Question("difference")
NONFINITE = (Question("nonfinite", "a"), Question("nonfinite", "b"))


def tensor_of(row: Row, question: Question) -> Tensor | None:
    """Return the tensor that the question is about, of a difference that of side a."""
    return row.pair.b if question.side == "b" else row.pair.a


def bad(row: Row, question: Question) -> bool | None:
    """Return whether it is what is looked for; None when nobody can tell."""
    outcome = row.outcome
    if question.kind == "difference":
        return None if outcome.verdict in _UNDECIDED else not outcome.verdict.agrees
    tensor = tensor_of(row, question)
    if tensor is None or tensor.digest in question.harmless:
        # What this side does not have holds nothing on it.
        return False
    return outcome.nonfinite_b if question.side == "b" else outcome.nonfinite_a


def seen(row: Row, question: Question) -> int:
    """Return when the tensor was seen, among those of its program."""
    tensor = tensor_of(row, question)
    return tensor.seen if tensor is not None else 0
