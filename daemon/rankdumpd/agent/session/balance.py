"""Balances of iterations: counts of tensors by outcome, and findings where the counts do not add
up. Pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rankdump._core.number_ranges import ranges
from rankdump._core.session_protocol import IterationEnd, SessionRequest
from rankdump._core.status import IterationStatus, SessionState, SessionStatus
from rankdump._core.units import format_count
from rankdumpd.agent.ledger.rows import OutcomeCountRow
from rankdumpd.agent.records import RecordOutcome, RecordStatus, StatisticRowsResult

_MAX_COUNT = (1 << 63) - 1


@dataclass(slots=True)
class IterationTally:
    """Running counts of one iteration; if the iteration runs twice, the counts of both runs are
    added.

    Kept small, because a live session has a tally for every iteration that ever ended.
    """

    expected: int = 0
    complete: bool = False
    stored: int = 0
    linked: int = 0
    same_as_baseline: int = 0
    degraded: int = 0
    dropped: dict[str, int] | None = None
    """Number of dropped tensors by reason; None while nothing is dropped."""
    degraded_by: dict[str, int] | None = None
    """Number of degraded tensors by reason; None while nothing is degraded."""
    bytes_in: int = 0
    bytes_stored: int = 0
    stall_us: int = 0
    positions: tuple[int, int] = (0, 0)
    ended_to: int = 0
    """Sequence number of the last end of the iteration that is counted."""

    def count_record(
        self, fate: RecordStatus, reason: str, bytes_in: int, bytes_stored: int
    ) -> None:
        """Count one record with its outcome."""
        if fate is RecordStatus.STORED:
            self.stored += 1
            self.bytes_in += bytes_in
            self.bytes_stored += bytes_stored
        else:
            self.count(fate, reason, bytes_in=bytes_in, bytes_stored=bytes_stored)

    def count(
        self, fate: RecordStatus, reason: str, *, records: int = 1, bytes_in: int, bytes_stored: int
    ) -> None:
        """Count records with the same outcome."""
        if fate is RecordStatus.DROPPED:
            self._drop(reason, records)
        else:
            self._keep(fate, reason, records)
        self.bytes_in += bytes_in
        self.bytes_stored += bytes_stored

    def count_rows(self, result: StatisticRowsResult) -> None:
        """Count rows of statistics; these have no bytes and no tensor file."""
        self._keep(result.status, result.reason, result.kept)
        for reason, places in result.refused.items():
            self._drop(reason, len(places))

    def end(self, end: IterationEnd) -> None:
        """Add the counts that the rank sends at the end of the iteration."""
        self.expected += end.expected
        for reason, count in end.dropped.items():
            self._drop(reason, count)
        self.stall_us += end.stall_us
        self.positions = _merge_positions(self.positions, (end.first_position, end.last_position))
        self.complete = True

    def status(self, request: SessionRequest, iteration: int) -> IterationStatus:
        """Return the present counts as a balance."""
        return IterationStatus(
            job_id=request.job_id,
            session_id=request.session_id,
            rank=request.rank,
            iteration=iteration,
            complete=self.complete,
            expected=_limit_count(self.expected),
            stored=self.stored,
            linked=self.linked,
            degraded=self.degraded,
            dropped={reason: _limit_count(n) for reason, n in (self.dropped or {}).items() if n},
            bytes_in=_limit_count(self.bytes_in),
            bytes_stored=self.bytes_stored,
            stall_us=_limit_count(self.stall_us),
            first_position=self.positions[0],
            last_position=self.positions[1],
            attempt=request.attempt,
            degraded_by={reason: n for reason, n in (self.degraded_by or {}).items() if n},
            same_as_baseline=self.same_as_baseline,
        )

    def _keep(self, fate: RecordStatus, reason: str, count: int) -> None:
        if fate is RecordStatus.STORED:
            self.stored += count
        elif fate is RecordStatus.LINKED:
            self.linked += count
        elif fate is RecordStatus.SAME_AS_BASELINE:
            self.linked += count
            self.same_as_baseline += count
        elif fate is RecordStatus.DEGRADED:
            self.degraded += count
            if self.degraded_by is None:
                self.degraded_by = {}
            self.degraded_by[reason] = self.degraded_by.get(reason, 0) + count

    def _drop(self, reason: str, count: int) -> None:
        if self.dropped is None:
            self.dropped = {}
        self.dropped[reason] = self.dropped.get(reason, 0) + count


class SessionTallies:
    """The running counts of every iteration of a session."""

    def __init__(self) -> None:
        self._tallies: defaultdict[int, IterationTally] = defaultdict(IterationTally)

    def restore(self, counts: Iterable[OutcomeCountRow], ends: Iterable[IterationEnd]) -> None:
        """Restore the counts from the ledger."""
        for row in counts:
            self._tallies[row.iteration].count(
                row.status,
                row.reason,
                records=row.records,
                bytes_in=row.bytes_in,
                bytes_stored=row.bytes_stored,
            )
        for end in ends:
            self._tallies[end.iteration].end(end)

    def add(self, outcomes: Iterable[RecordOutcome], result: Iterable[StatisticRowsResult]) -> None:
        """Count committed records and rows of statistics."""
        for outcome in outcomes:
            head = outcome.head
            self._tallies[head.iteration].count_record(
                outcome.status, outcome.reason, head.kind.byte_count, outcome.bytes_stored
            )
        for frame in result:
            self._tallies[frame.rows.iteration].count_rows(frame)

    def adjust_stored_bytes(self, iteration: int, more_bytes: int) -> None:
        """Add a change in size of stored tensors to an iteration."""
        self._tallies[iteration].bytes_stored += more_bytes

    def is_first_end(self, end: IterationEnd, sequence: int) -> bool:
        """Return whether an end with this sequence number was not counted yet."""
        return sequence > self._tallies[end.iteration].ended_to

    def end(self, request: SessionRequest, end: IterationEnd, sequence: int) -> IterationStatus:
        """Complete an iteration, unless this end or a later one has done so; return its balance."""
        tally = self._tallies[end.iteration]
        if self.is_first_end(end, sequence):
            tally.end(end)
            tally.ended_to = sequence
        return tally.status(request, end.iteration)

    def statuses(self, request: SessionRequest) -> list[IterationStatus]:
        """Return the balance of every iteration of which anything has arrived, in order."""
        return [tally.status(request, number) for number, tally in sorted(self._tallies.items())]


def list_balance_findings(
    session: SessionStatus, iterations: Sequence[IterationStatus]
) -> list[str]:
    """Return findings about the counts of one session that do not add up."""
    found = [
        f"rank {status.rank}, iteration {status.iteration}: {status.expected} tensors expected, "
        f"{status.kept_tensors} kept and {sum(status.dropped.values())} dropped"
        for status in iterations
        if status.complete and not status.is_balanced
    ]
    if session.state is not SessionState.OPEN:
        found += _describe_open_iterations(session, iterations)
    explained = session.excluded or session.notes
    kept = any(status.kept_tensors for status in iterations)
    if session.state is SessionState.CLOSED and not kept and not explained:
        found.append(
            f"rank {session.rank} collected nothing: {_explain_nothing(session, iterations)}"
        )
    return found


def _describe_open_iterations(
    session: SessionStatus, iterations: Sequence[IterationStatus]
) -> list[str]:
    """Return a sentence about a rank that ended before its iterations did; none if all ended.

    The rank can have ended only within the last iteration. If earlier iterations have no end, their
    end is still missing, because it is sent after their tensors.
    """
    left = [status for status in iterations if not status.complete]
    if not left:
        return []
    last, earlier = left[-1], left[:-1]
    if last is not iterations[-1]:
        last, earlier = None, left
    numbers = ranges(status.iteration for status in earlier)
    ends = f"iteration{'s' * (len(earlier) > 1)} {numbers} had not arrived"
    ends = f"the end{'s' * (len(earlier) > 1)} of {ends}"
    if last is None:
        return [f"rank {session.rank}: {ends}"]
    kept = format_count(last.kept_tensors, "tensor")
    within = f"rank {session.rank} ended within iteration {last.iteration}, with {kept} in the tree"
    return [f"{within}; {ends}" if earlier else within]


def _limit_count(total: int) -> int:
    """Limit a sum of numbers from a rank to what a message and a column can hold."""
    return min(total, _MAX_COUNT)


def _merge_positions(known: tuple[int, int], more: tuple[int, int]) -> tuple[int, int]:
    if not any(known) or not any(more):
        return known if any(known) else more
    return min(known[0], more[0]), max(known[1], more[1])


def _explain_nothing(session: SessionStatus, iterations: Iterable[IterationStatus]) -> str:
    reasons: Counter[str] = Counter()
    for status in iterations:
        reasons.update(status.dropped)
    if reasons:
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        return f"dropped: {counts}"
    ended = sum(1 for status in iterations if status.complete)
    if ended:
        return f"no tensor was selected in {ended} selected iterations"
    return f"none of the {session.iterations_seen} iterations it ran was selected"
