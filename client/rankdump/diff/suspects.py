"""Rows to the origins of a report, with the lines of the script that the suspects came from.

Reads the published order and the recorded stacks of the two dumps, and only where they matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from rankdump.contract.errors import DamagedError
from rankdump.contract.events import EventKind
from rankdump.contract.graph import SourceLine
from rankdump.contract.plan import Iterations
from rankdump.contract.selection import matched_name
from rankdump.diff import origin_words as words
from rankdump.diff.origin import Found, found_on_ranks
from rankdump.diff.origin_ranks import Called, Meeting, Merged, origin_of, sender, whole
from rankdump.diff.origin_rows import DIFFERENCE, NONFINITE, Question
from rankdump.diff.origin_weights import weights
from rankdump.diff.values import Origin, Row, Suspect
from rankdump.reader import Dump, read_order

_Stacks: TypeAlias = "Mapping[str, tuple[SourceLine, ...]]"


@dataclass(frozen=True, slots=True)
class Sides:
    """The two dumps, and what of their stacks has been read."""

    a: Dump
    b: Dump
    ranks: Mapping[int, int]
    """Which rank of b each rank of a was compared with."""
    stacks: dict[tuple[str, int], _Stacks] = field(
        default_factory=dict["tuple[str, int]", "_Stacks"]
    )

    def source(self, row: Row, question: Question) -> tuple[SourceLine, ...]:
        """Return the stack of a call, of the dump that the question is about if it has one."""
        sides = [("a", row.name_a, row.rank), ("b", row.name_b, self.ranks.get(row.rank, row.rank))]
        for side, name, rank in reversed(sides) if question.side == "b" else sides:
            known = self._stacks(side, rank)
            for each in (name, matched_name(name)):
                if each in known:
                    return known[each]
        return ()

    def merged(self, found: Sequence[Found], question: Question) -> Merged:
        """Return what the published order says of the iterations of the suspects."""
        steps = sorted({each.first.iteration for each in found})
        wanted = Iterations("", tuple((step, step) for step in steps if step >= 0))
        # Suspects are called by ranks and names of a, but where the question is about b.
        asked = (self.b,) if question.side == "b" else (self.a, self.b)
        if any(rank != other for rank, other in self.ranks.items()):
            asked = () if question.side == "b" else (self.a,)
        for dump in asked:
            try:
                return _order(dump, wanted)
            except DamagedError:  # none was published: ranks speak for themselves
                continue
        return Merged()

    def _stacks(self, side: str, rank: int) -> _Stacks:
        if (side, rank) not in self.stacks:
            self.stacks[side, rank] = _stacks(self.a if side == "a" else self.b, rank)
        return self.stacks[side, rank]


def origins(rows: Sequence[Row], sides: Sides) -> tuple[tuple[Origin, ...], tuple[Origin, ...]]:
    """Return the origins of the whole, and those of each rank."""
    of_all: list[Origin] = []
    of_ranks: list[Origin] = []
    for question in (DIFFERENCE, *NONFINITE):
        found = found_on_ranks(rows, question)
        own = [origin_of(each, _suspects(each, rows, sides)) for each in found]
        merged = sides.merged(found, question) if len(found) > 1 else Merged()
        together = whole(found, merged, [origin.suspects[0] for origin in own])
        of_ranks.extend(
            _received(origin, sender(each, found, merged))
            for each, origin in zip(found, own, strict=True)
        )
        if together is not None:
            # With one rank its own answer is the whole one, with all of its candidates.
            of_all.append(own[0] if len(found) == 1 else together)
    of_ranks.sort(key=lambda origin: origin.suspects[0].rank)
    return tuple(of_all), tuple(of_ranks)


def _received(origin: Origin, rank: int | None) -> Origin:
    """Return the origin of a rank with a word on who sent it, if another rank did."""
    if rank is None:
        return origin
    first, *others = origin.suspects
    told = replace(first, reason=first.reason + words.sent_by(rank))
    return replace(origin, suspects=(told, *others))


def _suspects(found: Found, rows: Sequence[Row], sides: Sides) -> tuple[Suspect, ...]:
    also = weights(found, rows)
    return tuple(
        Suspect(
            rank=step.row.rank,
            iteration=step.row.iteration,
            position=step.row.position,
            op_type=step.row.op_type,
            name_a=step.row.name_a,
            name_b=step.row.name_b,
            backward=step.row.backward,
            reason=reason + (also if at == 0 else ""),
            source=sides.source(step.row, found.question),
        )
        for at, (step, reason) in enumerate(zip(found.steps, found.reasons, strict=True))
    )


def _stacks(dump: Dump, rank: int) -> _Stacks:
    try:
        found = dump.where(rank=rank).sources
    except DamagedError:  # what stands in the tensors does not depend on it
        return {}
    return {
        name: tuple(SourceLine(each.file, each.line, "", each.code) for each in frames)
        for name, frames in found.items()
    }


def _order(dump: Dump, wanted: Iterations) -> Merged:
    places: dict[Called, int] = {}
    meetings: list[Meeting] = []
    for entry in read_order(dump.root).entries(iterations=wanted):
        for rank in entry.ranks:
            places.setdefault((rank, entry.iteration, entry.name), entry.position)
        if entry.kind.collective or entry.kind is EventKind.RECV:
            receivers = frozenset(entry.ranks)
            senders = receivers if entry.kind.collective else frozenset((entry.peer,))
            meetings.append(Meeting(entry.iteration, entry.position, senders, receivers))
    return Merged(places, meetings)
