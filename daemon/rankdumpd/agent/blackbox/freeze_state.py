"""Freezes of an agent that are under way, and earlier ones that are remembered. Freezes of the last
minute are repeated in the reports to the coordinator; they are not stored.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rankdump._core.black_box import FaultKind, FaultNotice
from rankdump._core.freeze_record import (
    FreezeReach,
    FreezeRecord,
    FrozenCause,
    FrozenRank,
    JobFreeze,
    MissingRank,
    RelayedFreeze,
    describe_absence,
    join_missing_ranks,
)
from rankdump._core.status import SessionState
from rankdumpd.agent.blackbox.freeze_decision import is_wait_over
from rankdumpd.agent.blackbox.raw_freeze import FrozenRing
from rankdumpd.agent.blackbox.step_ring import StepRing
from rankdumpd.agent.session.rank_session import RankSession

MAX_CAUSES = 256
"""Largest number of causes that the record of a freeze contains."""


@dataclass(frozen=True, slots=True)
class FreezeAnswer:
    """Answer to a request to freeze a job."""

    trees: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FreezeOrder:
    """A cause that may freeze the rings of a job."""

    job_id: str
    attempt: int
    cause: FrozenCause
    relayed_iteration: int | None = None
    """Iteration of a freeze that the coordinator relays to all agents of the job; None for a cause
    that this agent found, which freezes the iteration of the cause.
    """
    answer: Future[FreezeAnswer] = field(default_factory=Future[FreezeAnswer])

    @property
    def iteration(self) -> int:
        """Iteration that is frozen."""
        found = self.relayed_iteration
        return self.cause.iteration if found is None else found


class RankProgress(NamedTuple):
    """Progress of a rank, as far as its steps have arrived."""

    iteration: int
    """Last iteration that the rank has ended; -1 for none."""
    arrived_s: float
    """Time at which the end of that iteration arrived."""


@dataclass(slots=True)
class OpenFreeze:
    """A freeze that waits for further steps."""

    record: FreezeRecord
    raw: Path
    begun_s: float
    earliest_end_s: float
    """Time before which the freeze is not complete, because other ranks may still report causes."""
    deadline_s: float
    """Time at which the wait is over, unless steps still arrive."""
    last_iteration: int
    """Iteration up to which steps are awaited from each rank."""
    orders: list[FreezeOrder] = field(default_factory=list[FreezeOrder])

    def append(self, order: FreezeOrder) -> None:
        """Add a later cause to the freeze."""
        self.orders.append(order)
        if len(self.record.causes) < MAX_CAUSES:
            causes = (*self.record.causes, order.cause)
            self.record = dataclasses.replace(self.record, causes=causes)

    def join(self, order: FreezeOrder) -> bool:
        """Become part of a freeze of the coordinator; return whether that changes anything.

        The coordinator's cause becomes the first one, and the causes of this agent follow.
        """
        record, cause = self.record, order.cause
        if (record.iteration, record.causes[0].identity) == (order.iteration, cause.identity):
            return False
        own = (each for each in record.causes if each.identity != cause.identity)
        causes = (cause, *own)[:MAX_CAUSES]
        self.last_iteration += order.iteration - record.iteration
        self.record = dataclasses.replace(record, iteration=order.iteration, causes=causes)
        return True

    def is_complete(self, ranks: Iterable[RankProgress], now_s: float) -> bool:
        """Return whether no more steps are awaited from the ranks that are still running."""
        if now_s < self.earliest_end_s:
            return False
        late = [each for each in ranks if each.iteration < self.last_iteration]
        return is_wait_over([each.arrived_s for each in late], self.deadline_s, now_s)


@dataclass(frozen=True, slots=True)
class PastFreeze:
    """The latest freeze of a job."""

    attempt: int
    iteration: int
    begun_s: float
    root: str = ""


def make_job_freeze(record: FreezeRecord) -> JobFreeze:
    """Return what other agents need to know of a freeze."""
    return JobFreeze(record.job_id, record.attempt, record.iteration, record.causes[0])


def select_rings(rings: Sequence[StepRing], attempt: int) -> list[StepRing]:
    """Return the rings with steps of an attempt, sorted by rank; if a rank has several sessions,
    only the ring of the newest one.
    """
    own = [ring for ring in rings if ring.session.request.attempt == attempt and len(ring)]
    return [each for _, each in sorted({ring.session.request.rank: ring for ring in own}.items())]


def take_rings(rings: Sequence[StepRing]) -> list[FrozenRing]:
    """Return the content of the rings; the caller holds their lock."""
    return [
        FrozenRing(ring.session.request, tuple(ring.kinds), tuple(ring.steps), ring.list_tensors())
        for ring in rings
    ]


def describe_rings(
    record: FreezeRecord,
    rings: Sequence[StepRing],
    sessions: Iterable[RankSession],
    reach: FreezeReach,
) -> FreezeRecord:
    """Return the record with the ranks that these rings belong to, and with the ranks that are
    missing.
    """
    ranks = tuple(map(_describe_ring, rings))
    known = {each.rank for each in ranks}
    missing = {
        rank: MissingRank(rank, f"{agent.reason} (host {agent.host})")
        for agent in reach.unreached
        for rank in agent.ranks
        if rank not in known
    }
    missing |= {
        session.request.rank: MissingRank(session.request.rank, explain_absence(session))
        for session in sessions
        if session.request.job_id == record.job_id and session.request.attempt == record.attempt
        if session.request.rank not in known
    }
    listed = tuple(each for _, each in sorted(missing.items()))
    return dataclasses.replace(
        record,
        ranks=ranks,
        missing=listed,
        agents=reach.agents,
        frozen_agents=reach.frozen_agents,
    )


def list_notes(record: FreezeRecord) -> tuple[str, ...]:
    """Return notes, besides the tree, for the person who asked for the freeze."""
    reached = f"frozen by {record.frozen_agents} of the {record.agents} agents of the job"
    absent = map(describe_absence, join_missing_ranks(record.missing))
    return (*((reached,) if record.agents > 1 else ()), *absent)


def _describe_ring(ring: StepRing) -> FrozenRank:
    status = ring.session.status()
    if ring.session.has_ended:
        ring.end_tensor()
    return FrozenRank(
        rank=status.rank,
        session_id=status.session_id,
        pid=status.pid,
        state=status.state,
        ended_by=status.ended_by,
        held_steps=len(ring),
        dropped_steps=ring.dropped_steps,
        held_tensors=len(ring.tensors),
        tensor_bytes=ring.tensors.element_bytes,
        dropped_tensors=ring.dropped_tensors,
    )


def explain_absence(session: RankSession, *, was_frozen: bool = False) -> str:
    """Return why a session has no step; `was_frozen` says that its steps are in an
    earlier freeze.
    """
    status = session.status()
    if not session.plan.black_box.steps:
        return "its plan has no black box"
    if was_frozen and status.state is SessionState.OPEN:
        return "it has sent no step since the last freeze"
    if status.state is SessionState.CLOSED:
        return "it had ended"
    if status.state is SessionState.LOST:
        how = f" ({status.ended_by})" if status.ended_by else ""
        return f"it was lost{how}, and had sent no step"
    return "it had sent no step"


def make_fault_cause(rank: int, notice: FaultNotice, now_us: int) -> FrozenCause:
    """Return the cause that a rank reported."""
    cause = FrozenCause(
        notice.kind, notice.iteration, notice.text, now_us, rank, source=notice.source
    )
    kind = notice.tensor_kind
    if kind is None:
        return cause
    return dataclasses.replace(
        cause,
        op_type=kind.op_type,
        op_name=kind.op_name,
        side=kind.side.value,
        slot=kind.slot,
        argument=kind.argument,
    )


def make_loss_cause(ring: StepRing, now_us: int) -> FrozenCause:
    """Return the cause for a rank whose process is gone."""
    status = ring.session.status()
    how = f" ({status.ended_by})" if status.ended_by else ""
    text = (
        f"rank {status.rank} ended without the end of its session{how}, "
        f"after iteration {ring.newest_iteration}"
    )
    return FrozenCause(FaultKind.LOST_RANK, ring.newest_iteration, text, now_us, status.rank)


def make_silence_cause(ring: StepRing, since_s: float, now_us: int) -> FrozenCause:
    """Return the cause for a rank that makes no steps."""
    rank = ring.session.request.rank
    text = (
        f"rank {rank} has come no further for {since_s:.0f} s, after iteration "
        f"{ring.finished_iteration}; its median step takes {ring.median_step_s:.2g} s"
    )
    return FrozenCause(FaultKind.NO_STEP, ring.newest_iteration, text, now_us, rank)


REPORTED_S = 60.0
"""Seconds for which a freeze is reported again, so that a coordinator that restarts in this time
can relay it.
"""
MAX_RELAYED = 256
"""Largest number of relayed freezes that are remembered."""

FreezeKey = tuple[str, int, int]
"""Job id, attempt and iteration of a freeze."""


class RecentFreezes:
    """Freezes that one agent reports or has received; safe to use from several threads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._own: dict[FreezeKey, tuple[JobFreeze, float]] = {}
        """Freezes of this agent, each with the time until which it is reported."""
        self._seen: dict[FreezeKey, RelayedFreeze] = {}
        """Freezes that the coordinator relayed, each as it was in the latest answer."""

    def add(self, freeze: JobFreeze, *, age_s: float = 0.0) -> None:
        """Add a freeze that began `age_s` seconds ago; it replaces a freeze with the same key."""
        until_s = self._clock() + REPORTED_S - max(0.0, age_s)
        with self._lock:
            self._forget_old()
            self._own[freeze.key] = freeze, until_s

    def remove(self, key: FreezeKey) -> None:
        """Forget a freeze that has become part of another one."""
        with self._lock:
            self._own.pop(key, None)

    def list_reported(self) -> tuple[JobFreeze, ...]:
        """Return the freezes that the next report contains."""
        with self._lock:
            self._forget_old()
            return tuple(freeze for freeze, _ in self._own.values())

    def _forget_old(self) -> None:
        now_s = self._clock()
        self._own = {key: own for key, own in self._own.items() if own[1] > now_s}

    def note_relayed(self, relayed: RelayedFreeze) -> tuple[bool, list[FrozenCause]]:
        """Remember a freeze that the coordinator relays. Return whether it is new, and those of its
        later causes that are new.
        """
        key = relayed.freeze.key
        with self._lock:
            before = self._seen.get(key)
            self._seen[key] = relayed
            while len(self._seen) > MAX_RELAYED:
                del self._seen[next(iter(self._seen))]
        known = {each.identity for each in before.later_causes} if before else set[object]()
        return before is None, [e for e in relayed.later_causes if e.identity not in known]

    def find_reach(self, key: FreezeKey) -> FreezeReach:
        """Return how far a freeze had spread among agents according to the coordinator's latest
        answer.
        """
        with self._lock:
            seen = self._seen.get(key)
        return FreezeReach() if seen is None else seen.reach
