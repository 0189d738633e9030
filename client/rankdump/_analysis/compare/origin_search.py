"""Search for the origins of a report's differences, with the source lines of the suspected calls,
and for the first cause of NaN and infinity in one dump. The search reads the published order, the
recorded stacks and a few tensors of the two dumps, and only where the result depends on them; for
one dump, it reads all tensors.

Tensors with equal digests are equal without being read, so it is not known whether they are finite.
The search reads only the inputs of the suspected call and applies the result to all tensors with
the same digest. When one of them is not finite, the search is repeated from there.

The origin in the whole job follows from the origins on its ranks. Received data is not an origin:
when the first bad tensor of a rank comes after a collective with another rank whose data was bad
earlier, the rank has only received it. Without a published order, results of collectives and
gradients of parameters, which ranks share, are skipped in favour of calls with earlier positions.

For one dump the search is the same, with the dump in place of both, so data that a rank received in
a collective is not a cause.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from rankdump._analysis.compare.pair_comparison import has_nonfinite_statistics
from rankdump._analysis.compare.programs import read_programs
from rankdump._analysis.compare.rank_origin import (
    DIFFERENCE_QUESTION,
    NONFINITE_QUESTIONS,
    OriginQuestion,
    RankOrigin,
    describe_differing_weights,
    find_rank_origins,
)
from rankdump._analysis.compare.report import (
    CallPair,
    ComparisonRow,
    DivergenceOrigin,
    DumpedTensor,
    ProgramPlace,
    SuspectCall,
)
from rankdump._analysis.compare.tensor_pairs import make_call_rows
from rankdump._analysis.reader.coordinator_files import read_order
from rankdump._analysis.reader.dump import Dump
from rankdump._analysis.reader.tensor_loader import load
from rankdump._analysis.reader.tensor_statistics import statistics
from rankdump._core.events import EventKind
from rankdump._core.graph import SourceLine
from rankdump._core.number_ranges import name_first_ranks
from rankdump._core.plan import IterationSelection
from rankdump._core.selection import strip_scope_prefix
from rankdump._layout.tree_paths import PARAMETER_OP_TYPE
from rankdump.errors import CorruptedError, UnsupportedError

_COLLECTIVE_TYPE = re.compile(
    r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast(?!_?to|_?tensors)|receive|recv",
    re.IGNORECASE,
)
_LAST_POSITION = 1 << 62
"""Position of parameters and their gradients, after all calls of their iteration."""

RankCall: TypeAlias = "tuple[int, int, str]"
"""Rank, iteration and name of a call."""


@dataclass(frozen=True, slots=True)
class RankExchange:
    """A collective, or a message that was received."""

    iteration: int
    position: int
    senders: frozenset[int]
    receivers: frozenset[int]


@dataclass(frozen=True, slots=True)
class MergedCallOrder:
    """Positions of calls and exchanges in the published order."""

    positions: Mapping[RankCall, int] = field(default_factory=dict[RankCall, int])
    """Position of each call in the order of all ranks."""
    exchanges: Sequence[RankExchange] = ()


def find_job_origin(
    found: Sequence[RankOrigin], merged: MergedCallOrder, suspects: Sequence[SuspectCall]
) -> DivergenceOrigin:
    """Return the origin in the whole job, given the origins on ranks with their
    likeliest suspects.
    """
    earliest = min(each.iteration_key for each in found)
    candidates = [
        (each, suspect)
        for each, suspect in zip(found, suspects, strict=True)
        if each.iteration_key == earliest
    ]
    ranks = [each for each, _ in candidates]
    own = [pair for pair in candidates if find_sender(pair[0], ranks, merged) is None]
    # If every rank seems to have received the bad data from another rank, the sender is unknown.
    own = sorted(own or candidates, key=lambda pair: _make_order_key(pair[0], merged))
    return _join_rank_origins(own, merged)


def find_sender(
    found: RankOrigin, others: Sequence[RankOrigin], merged: MergedCallOrder
) -> int | None:
    """Return the rank that sent the bad data; None when it started on the rank itself."""
    ranks = (other.likeliest_row.rank for other in others if _is_sent_by(found, other, merged))
    return next(ranks, None)


def convert_rank_origin(found: RankOrigin, suspects: tuple[SuspectCall, ...]) -> DivergenceOrigin:
    """Return the origin on one rank as a value of the report."""
    question = found.question
    return DivergenceOrigin(
        question.kind, question.side, not found.ambiguity, suspects, found.ambiguity
    )


def _join_rank_origins(
    own: list[tuple[RankOrigin, SuspectCall]], merged: MergedCallOrder
) -> DivergenceOrigin:
    first, suspect = own[0]
    question = first.question
    rows = [each.likeliest_row for each, _ in own]
    if len({(row.name_a, row.name_b) for row in rows}) > 1:
        ranks = ", ".join(str(row.rank) for row in rows[:8])
        order = "the merged order" if merged.positions else "their own order"
        why = (
            f"it starts at different calls on ranks {ranks}; the first one listed is the "
            f"earliest in {order}"
        )
        return DivergenceOrigin(question.kind, question.side, False, tuple(s for _, s in own), why)
    sure = [pair for pair in own if not pair[0].ambiguity] or own[:1]
    first, suspect = sure[0]
    # The difference that the reason states has to be an upper bound for all these ranks.
    _, widest = max(sure, key=lambda pair: pair[0].error_key)
    others = sorted(row.rank for row in rows if row is not first.likeliest_row)
    reason = widest.reason + (f"; the same on {name_first_ranks(others)}" if others else "")
    named = replace(suspect, reason=reason)
    return DivergenceOrigin(
        question.kind, question.side, not first.ambiguity, (named,), first.ambiguity
    )


def _is_sent_by(found: RankOrigin, other: RankOrigin, merged: MergedCallOrder) -> bool:
    """Return whether a rank received the bad data from `other`."""
    own, its = found.likeliest_row, other.likeliest_row
    if its.rank == own.rank:
        return False
    at, sent_at = _find_position(found, merged), _find_position(other, merged)
    if at is not None and sent_at is not None:
        return any(
            each.iteration == own.iteration
            and sent_at <= each.position <= at
            and its.rank in each.senders
            and own.rank in each.receivers
            for each in merged.exchanges
        )
    return _is_shared_call(own) and not _is_shared_call(its) and its.position < own.position


def _make_order_key(found: RankOrigin, merged: MergedCallOrder) -> tuple[int, int, int]:
    at, row = _find_position(found, merged), found.likeliest_row
    return _LAST_POSITION if at is None else at, row.position, row.rank


def _find_position(found: RankOrigin, merged: MergedCallOrder) -> int | None:
    """Return the position of the likeliest call in the merged order; None if it is unknown."""
    row = found.likeliest_row
    if merged.positions and row.op_type == PARAMETER_OP_TYPE:
        return _LAST_POSITION
    name = row.name_b if found.question.side == "b" else row.name_a
    return merged.positions.get((row.rank, row.iteration, name))


def _is_shared_call(row: ComparisonRow) -> bool:
    """Return whether several ranks have the same result of a call."""
    return row.op_type == PARAMETER_OP_TYPE or _COLLECTIVE_TYPE.search(row.op_type) is not None


_CallStacks: TypeAlias = "Mapping[str, tuple[SourceLine, ...]]"

_MAX_SEARCH_ROUNDS = 64
"""Largest number of steps backwards; each step reads the inputs of one call on each rank."""


@dataclass(frozen=True, slots=True)
class ComparedDumps:
    """The two compared dumps, and a cache of their call stacks."""

    a: Dump
    b: Dump
    places: Mapping[ProgramPlace, ProgramPlace] = field(
        default_factory=dict[ProgramPlace, ProgramPlace]
    )
    """Rank and iteration of b for those of a that were compared with them, if they differ."""
    stacks: dict[tuple[str, int], _CallStacks] = field(
        default_factory=dict["tuple[str, int]", "_CallStacks"]
    )

    def find_stack(self, row: ComparisonRow, question: OriginQuestion) -> tuple[SourceLine, ...]:
        """Return the stack of a call, preferably from the dump that the question is about."""
        rank, _ = self.find_place_of_b(row)
        sides = [("a", row.name_a, row.rank), ("b", row.name_b, rank)]
        for side, name, rank in reversed(sides) if question.side == "b" else sides:
            known = self._stacks(side, rank)
            for each in (name, strip_scope_prefix(name)):
                if each in known:
                    return known[each]
        return ()

    def find_place_of_b(self, row: ComparisonRow) -> ProgramPlace:
        """Return rank and iteration of the call on side b."""
        return self.places.get(row.place, row.place)

    def read_merged_order(
        self, found: Sequence[RankOrigin], question: OriginQuestion
    ) -> MergedCallOrder:
        """Return the published order of the iterations of the suspects."""
        steps = sorted({each.likeliest_row.iteration for each in found})
        wanted = IterationSelection("", tuple((step, step) for step in steps if step >= 0))
        # Suspects have the ranks and names of side a, unless the question is about side b.
        asked = (self.b,) if question.side == "b" else (self.a, self.b)
        if self.places:
            asked = () if question.side == "b" else (self.a,)
        for dump in asked:
            try:
                return _read_call_order(dump, wanted)
            except CorruptedError:  # no order was published
                continue
        return MergedCallOrder()

    def _stacks(self, side: str, rank: int) -> _CallStacks:
        if (side, rank) not in self.stacks:
            self.stacks[side, rank] = _read_stacks(self.a if side == "a" else self.b, rank)
        return self.stacks[side, rank]


def find_origins(
    rows: Sequence[ComparisonRow], sides: ComparedDumps
) -> tuple[tuple[DivergenceOrigin, ...], tuple[DivergenceOrigin, ...]]:
    """Return the origins in the whole job, and the origins on each rank."""
    of_all: list[DivergenceOrigin] = []
    of_ranks: list[DivergenceOrigin] = []
    for question in (DIFFERENCE_QUESTION, *NONFINITE_QUESTIONS):
        found = find_rank_origins(rows, question)
        if not found:
            continue
        own = [convert_rank_origin(each, _build_suspects(each, rows, sides)) for each in found]
        merged = sides.read_merged_order(found, question) if len(found) > 1 else MergedCallOrder()
        together = find_job_origin(found, merged, [origin.suspects[0] for origin in own])
        of_ranks.extend(
            _add_sender(origin, find_sender(each, found, merged))
            for each, origin in zip(found, own, strict=True)
        )
        # The origin on a single rank has all candidates.
        of_all.append(own[0] if len(found) == 1 else together)
    of_ranks.sort(key=lambda origin: origin.suspects[0].rank)
    return tuple(of_all), tuple(of_ranks)


def _add_sender(origin: DivergenceOrigin, rank: int | None) -> DivergenceOrigin:
    """Return the origin on a rank; if another rank sent the bad data, its reason names
    that rank.
    """
    if rank is None:
        return origin
    first, *others = origin.suspects
    named = replace(first, reason=f"{first.reason}; it was received from rank {rank}")
    return replace(origin, suspects=(named, *others))


def _build_suspects(
    found: RankOrigin, rows: Sequence[ComparisonRow], sides: ComparedDumps
) -> tuple[SuspectCall, ...]:
    also = describe_differing_weights(found, rows)
    return tuple(
        _build_suspect(step.first_row, reason + (also if at == 0 else ""), found.question, sides)
        for at, (step, reason) in enumerate(zip(found.calls, found.reasons, strict=True))
    )


def _build_suspect(
    row: ComparisonRow, reason: str, question: OriginQuestion, sides: ComparedDumps
) -> SuspectCall:
    own = row.place
    rank, iteration = sides.find_place_of_b(row) if question.side == "b" else own
    return SuspectCall(
        rank=rank,
        iteration=iteration,
        position=row.position,
        op_type=row.op_type,
        name_a=row.name_a,
        name_b=row.name_b,
        backward=row.backward,
        reason=reason,
        source=sides.find_stack(row, question),
        row_place=None if (rank, iteration) == own else own,
    )


def _read_stacks(dump: Dump, rank: int) -> _CallStacks:
    try:
        found = dump.where(rank=rank).sources
    except CorruptedError:  # the origin does not depend on the stacks
        return {}
    return {
        name: tuple(SourceLine(each.file, each.line, "", each.code) for each in frames)
        for name, frames in found.items()
    }


def _read_call_order(dump: Dump, wanted: IterationSelection) -> MergedCallOrder:
    places: dict[RankCall, int] = {}
    meetings: list[RankExchange] = []
    for entry in read_order(dump.root).entries(iterations=wanted):
        for rank in entry.ranks:
            places.setdefault((rank, entry.iteration, entry.name), entry.position)
        if entry.kind.is_collective or entry.kind is EventKind.RECV:
            receivers = frozenset(entry.ranks)
            senders = receivers if entry.kind.is_collective else frozenset((entry.peer,))
            meetings.append(RankExchange(entry.iteration, entry.position, senders, receivers))
    return MergedCallOrder(places, meetings)


def resolve_nonfinite_rows(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """Return the rows, with the missing information whether tensors are finite that decide on an
    origin.
    """
    known = list(rows)
    for question in NONFINITE_QUESTIONS:
        if any(question.is_bad(row) for row in known):
            _resolve_question(known, question)
    return known


def _resolve_question(rows: list[ComparisonRow], question: OriginQuestion) -> None:
    tensors = list(map(question.select, rows))
    digests = [tensor.digest if tensor is not None else "" for tensor in tensors]
    alike: defaultdict[str, list[int]] = defaultdict(list)
    for at, digest in enumerate(digests):
        alike[digest].append(at)

    def set_nonfinite(at: int, found: bool) -> None:
        """Store whether a tensor is finite, for it and for tensors with the same digest for which
        it is unknown.
        """
        for each in alike[digests[at]] if digests[at] else [at]:
            row = rows[each]
            if question.is_bad(row) is None:
                outcome = replace(row.outcome, **{f"nonfinite_{question.side}": found})
                rows[each] = row._replace(outcome=outcome)

    for at, row in enumerate(rows):
        if question.is_bad(row):
            set_nonfinite(at, True)
    for _ in range(_MAX_SEARCH_ROUNDS):
        places = {id(row): at for at, row in enumerate(rows)}
        asked = [row for found in find_rank_origins(rows, question) for row in found.unknown]
        answers = [
            (places[id(row)], _has_nonfinite_elements(question.select(row))) for row in asked
        ]
        known = [(at, found) for at, found in answers if found is not None]
        for at, found in known:
            set_nonfinite(at, found)
        if not known:
            return


def _has_nonfinite_elements(tensor: DumpedTensor | None) -> bool | None:
    """Return whether elements are NaN or infinite; None when the file cannot be read."""
    if tensor is None or tensor.entry is None:
        return None
    try:
        computed = statistics(load(tensor.entry))
    except (CorruptedError, UnsupportedError):
        return None
    return computed.nans + computed.infinities > 0


def find_first_cause(dump: Dump) -> DivergenceOrigin | None:
    """Return where NaN or infinity starts in a dump; None if every tensor is known to be finite.

    `dump` is best restricted to the first iteration with such a tensor, because all of its tensors
    are read. Damaged tables are ignored.
    """
    known: dict[str, bool] = {}
    rows = [
        row._replace(outcome=replace(row.outcome, nonfinite_a=_has_nonfinite(row.pair.a, known)))
        for program in read_programs(dump, [])
        for call in program.calls
        for row in make_call_rows(program, call.position, CallPair(call, None, "exact"))
    ]
    origins, _ = find_origins(rows, ComparedDumps(dump, dump))
    return next((each for each in origins if each.kind == "nonfinite"), None)


def _has_nonfinite(tensor: DumpedTensor | None, known: dict[str, bool]) -> bool | None:
    """Return whether a tensor has NaN or infinity; None when neither its row nor its file tells.

    `known` contains the results by digest.
    """
    tabled = has_nonfinite_statistics(tensor)
    if tensor is None or tabled is not None:
        return tabled
    if tensor.digest in known:
        return known[tensor.digest]
    found = _has_nonfinite_elements(tensor)
    if found is not None and tensor.digest:
        known[tensor.digest] = found
    return found
