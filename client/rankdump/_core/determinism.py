"""How far a training is deterministic: noise runs, in which an environment variable requests that
the inputs of attached models are moved by one unit in the last place; and the comparison of two
runs of one step in one process, by digests of the observed tensors, with its report. Pure.

The first tensor that differs, in the order of the first run, identifies the operator: no tensor
before it differs, and of nested operators the innermost one ends first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from rankdump._core.record import TensorSide, name_argument

PERTURB_VARIABLE = "RANKDUMP_PERTURB"
"""Variable that requests a noise run; `rankdump run --perturb` sets it."""
PERTURB_SETTING = "rankdump.perturb"
"""Setting of a run card that names the moved inputs, such as `1ulp: batch.0`."""
ONE_ULP = "1ulp"
PERTURBATIONS = (ONE_ULP,)
"""Allowed values of the variable; if it is unset or empty, nothing is moved."""
PERTURB_WARNING = (
    f"this is a noise run: the first floating input of each call of an attached model is moved by "
    f"one unit in its last place ({ONE_ULP}), which changes the results of the training"
)


def read_perturbation(environ: Mapping[str, str]) -> str:
    """Return the perturbation that the environment requests; empty for none or an unknown one."""
    asked = environ.get(PERTURB_VARIABLE, "")
    return asked if asked in PERTURBATIONS else ""


def find_perturbation_fault(environ: Mapping[str, str]) -> str:
    """Return a sentence about a wrong value of the variable; empty if the value is allowed."""
    asked = environ.get(PERTURB_VARIABLE, "")
    if not asked or asked in PERTURBATIONS:
        return ""
    return f"{PERTURB_VARIABLE}={asked!r:.60} is not allowed; allowed: {', '.join(PERTURBATIONS)}"


MAX_DIFFERENCES = 64
"""Maximum number of differences that a report keeps; further ones are only counted."""
_MAX_NOTES = 8
_Place: TypeAlias = "tuple[str, str, int, int]"
"""Operator, side, slot, and how often this combination occurred before."""


class TensorDigest(NamedTuple):
    """Digest of an observed tensor, or of another value, such as the state of a generator."""

    op_type: str
    op_name: str
    side: TensorSide
    slot: int
    argument: str
    kind: str
    """Element type and shape of the tensor."""
    digest: str

    @property
    def place_name(self) -> str:
        """Place of the tensor, such as `input.0`, with the name of its argument if it has one:
        `output.0 (loss)`.
        """
        name = name_argument(self.argument)
        place = f"{self.side.value}.{self.slot}"
        return f"{place} ({name})" if name else place


@dataclass(slots=True)
class RunDigests:
    """Digests of all values that were observed in one run, in order."""

    digests: list[TensorDigest] = field(default_factory=list[TensorDigest])
    sources: dict[str, str] = field(default_factory=dict[str, str])
    """`file:line` of the script that made a call, by the name of its operator."""
    unread: int = 0
    """Number of tensors that could not be read and have no digest."""


@dataclass(frozen=True, slots=True)
class ReplayDifference:
    """A tensor that differs between the two runs."""

    op_name: str
    op_type: str
    place: str
    """Place of the tensor, such as `output.0`."""
    reason: str
    """Clause that explains the difference, such as `its inputs agree, and output.0 differs`."""
    source: str = ""
    """`file:line` of the script; empty when it is not known."""


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """Result of comparing two runs of one step."""

    iteration: int
    rank: int
    compared: int = 0
    """Number of tensors and other values of the first run."""
    differing: int = 0
    differences: tuple[ReplayDifference, ...] = ()
    """Differences in the order of the first run, at most MAX_DIFFERENCES; the first one is the
    origin.
    """
    calls: int = 0
    """Number of calls of modules that were observed in the first run."""
    unread: int = 0
    """Number of tensors that could not be read and so were not compared."""
    raised: str = ""
    """Error that the second run raised but not the first."""
    skipped: str = ""
    """Reason why there was no second run."""

    @property
    def is_deterministic(self) -> bool | None:
        """Whether no value differed; None if there was no second run."""
        return None if self.skipped else not (self.differing or self.raised)

    def __str__(self) -> str:
        """Return the report as one sentence."""
        return self.describe(f"replay of iteration {self.iteration} on rank {self.rank}")

    def describe(self, step: str) -> str:
        """Return the report as one sentence that begins with a name of the replay."""
        if self.skipped:
            return f"{step}: skipped, the step ran once: {self.skipped}"
        counts = f"{self.differing:,} of {self.compared:,} digests differ"
        raised = f"; the second run raised {self.raised}" if self.raised else ""
        raised += "" if self.calls else "; no call of an attached model was observed"
        noun = "tensor" if self.unread == 1 else "tensors"
        raised += f"; {self.unread:,} {noun} could not be read" if self.unread else ""
        if not self.differences:
            same = f"all {self.compared:,} digests are the same"
            return f"{step}: {counts if self.differing else same}{raised}"
        first = self.differences[0]
        source = f", at {first.source}" if first.source else ""
        return f"{step}: {counts}{raised}; first {first.op_name}: {first.reason}{source}"


def compare_runs(
    first: RunDigests, second: RunDigests, *, complete: bool = True
) -> tuple[int, tuple[ReplayDifference, ...]]:
    """Return the number of differences, and the first of them in the order of the first run.

    If the second run is not complete, values that it did not reach are no differences.
    """
    other = dict(_number(second.digests))
    found: list[tuple[TensorDigest, str]] = []
    seen: set[str] = set()
    for place, own in _number(first.digests):
        its = other.pop(place, None)
        if its is None:
            if not complete:
                continue
            found.append((own, f"only the first run has its {own.place_name}"))
        elif (own.kind, own.digest) != (its.kind, its.digest):
            found.append((own, _describe_difference(own, its, has_inputs=own.op_name in seen)))
        if own.side is TensorSide.INPUT:
            seen.add(own.op_name)
    found += [(its, f"only the second run has its {its.place_name}") for its in other.values()]
    sources = second.sources | first.sources
    kept = found[:MAX_DIFFERENCES]
    return len(found), tuple(_make_difference(own, reason, sources) for own, reason in kept)


def _number(digests: Sequence[TensorDigest]) -> Iterator[tuple[_Place, TensorDigest]]:
    counts: Counter[tuple[str, str, int]] = Counter()
    for each in digests:
        place = each.op_name, each.side.value, each.slot
        yield (*place, counts[place]), each
        counts[place] += 1


def _describe_difference(own: TensorDigest, its: TensorDigest, *, has_inputs: bool) -> str:
    what = f"{own.place_name} differs"
    if own.kind != its.kind:
        what += f" ({own.kind} in the first run, {its.kind} in the second)"
    if own.side is TensorSide.INPUT:
        return f"{what}, which was made between the operators that are observed"
    return f"its inputs agree, and {what}" if has_inputs else what


def _make_difference(
    own: TensorDigest, reason: str, sources: Mapping[str, str]
) -> ReplayDifference:
    forward = own.op_name.removeprefix("Gradients/").removeprefix("Recompute/")
    source = sources.get(own.op_name) or sources.get(forward, "")
    return ReplayDifference(own.op_name, own.op_type, own.place_name, reason, source)


class ReplayTally:
    """Replays of a session so far, for the notes at the end of the session."""

    def __init__(self) -> None:
        self._equal = 0
        self._notes: list[str] = []
        self._left_out = 0

    def add(self, report: ReplayReport) -> None:
        """Count a replay."""
        if report.is_deterministic:
            self._equal += 1
        elif len(self._notes) < _MAX_NOTES:
            self._notes.append(report.describe(f"replay of iteration {report.iteration}"))
        else:
            self._left_out += 1

    def list_notes(self) -> list[str]:
        """Return a sentence for each replay that differed or was skipped, and one sentence for the
        remaining replays.
        """
        notes = [*self._notes]
        if self._left_out:
            notes.append(f"{self._left_out:,} more replays differ or were skipped")
        if self._equal:
            steps = "1 step was" if self._equal == 1 else f"{self._equal:,} steps were"
            notes.append(f"{steps} replayed with the same digests")
        return notes
