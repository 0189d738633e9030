"""Control of running jobs. A control asks all ranks of a job for their iteration, chooses one, and
lets all ranks change their plan in it, or lets their agents freeze the iteration that is running.

Agents fetch orders with the answers to their reports. The iteration with which a change begins, and
the result for each rank, are pure functions of the ranks' answers by session.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rankdump._core.bounded_cache import remember
from rankdump._core.freeze_record import FreezeReach
from rankdump._core.job_control import (
    ControlAction,
    ControlAnswer,
    ControlledRank,
    ControlOrder,
    ControlResult,
)
from rankdump._core.status import SessionState, SessionStatus
from rankdump.errors import RankdumpError, RejectedError, UnavailableError

MIN_STEP_US = 1_000
"""Shortest duration of a step, in microseconds, that the computation uses; a shorter step counts as
this long.
"""
MIN_LEAD_S = 1.0
"""Shortest time in seconds between the choice of an iteration and its beginning."""


@dataclass(frozen=True, slots=True)
class ControlledSession:
    """The newest session of a rank."""

    rank: int
    session_id: str
    absence: str
    """Why the rank is not asked; empty when it is asked."""


def list_sessions(job_id: str, sessions: Sequence[SessionStatus]) -> tuple[ControlledSession, ...]:
    """Return the sessions of a job; RejectedError when no rank of the job is running
    and connected.
    """
    newest = {each.rank: each for each in sorted(sessions, key=lambda each: each.attempt)}
    states = Counter(each.state for each in newest.values())
    if states[SessionState.LOST] and not states[SessionState.OPEN]:
        raise RejectedError(
            f"no rank of job {job_id!r} is connected to its agent: of {len(newest)} ranks "
            f"{states[SessionState.LOST]} are lost, and {states[SessionState.CLOSED]} have ended"
        )
    if not states[SessionState.OPEN]:
        raise RejectedError(f"job {job_id!r} has ended: none of its ranks runs")
    return tuple(
        ControlledSession(rank, each.session_id, _explain_absence(each))
        for rank, each in sorted(newest.items())
    )


def _explain_absence(session: SessionStatus) -> str:
    if session.state is SessionState.CLOSED:
        return "it has ended its session"
    # Any other lost session may reconnect in a moment, as ranks do when their shared memory is
    # ready.
    if session.state is SessionState.LOST and (session.ended_by or session.last_events_known):
        return f"its process is gone ({session.ended_by or 'it is not known how it ended'})"
    return ""


def choose_iteration(positions: Sequence[ControlAnswer], *, round_s: float) -> int:
    """Return the first iteration that no rank begins before the next messages reach it.

    `round_s` is the time that the first messages took, including the wait for each agent's next
    report. Every rank may have continued since it answered. No change begins before an earlier one.
    Ranks that have the order already keep their iteration, and all others begin with the same one
    if that is possible.
    """
    lead_us = (MIN_LEAD_S + round_s) * 1e6
    return max(
        max(each.pending, each.iteration + 1 + math.ceil(lead_us / max(each.step_us, MIN_STEP_US)))
        if each.begun is None
        else each.begun
        for each in positions
    )


def judge_freeze(
    sessions: Sequence[ControlledSession],
    asked: Mapping[str, ControlAnswer],
    unreached: Mapping[int, str],
    iteration: int | None,
) -> ControlResult:
    """Return the result of a freeze for each rank; `unreached` contains, for some ranks, why their
    agent has not frozen them.

    Agents answer for their ranks. The agent keeps the steps of a rank that has ended as long as its
    job is running.
    """
    ranks: list[ControlledRank] = []
    for session in sessions:
        answer = asked.get(session.session_id)
        reason = answer.refused if answer else session.absence
        # Unreached agents list only ranks that are running; a rank that has ended has as its reason
        # its absence.
        reason = reason or unreached.get(session.rank, session.absence if unreached else "")
        if iteration is None and not reason:
            reason = "no rank has said which iteration it runs"
        ranks.append(ControlledRank(session.rank, None if reason else iteration, reason))
    return ControlResult(iteration, tuple(ranks))


def judge_ranks(
    sessions: Sequence[ControlledSession],
    asked: Mapping[str, ControlAnswer],
    applied: Mapping[str, ControlAnswer],
    iteration: int | None,
    *,
    waited_s: float,
) -> ControlResult:
    """Return the result of an order for each rank, according to the answers in both rounds."""
    silence = (
        f"no answer within {waited_s:.0f} s: its agent is away, or of an earlier release, or its "
        "process is stopped or gone"
    )
    ranks: list[ControlledRank] = []
    for session in sessions:
        first, second = asked.get(session.session_id), applied.get(session.session_id)
        # The rank may have reconnected since the sessions were listed.
        reason = first.refused if first else session.absence or silence
        if reason or iteration is None:
            ranks.append(ControlledRank(session.rank, None, reason))
        elif second is None:
            reason = f"{silence}; it begins in iteration {iteration}, or not at all"
            ranks.append(ControlledRank(session.rank, None, reason, unconfirmed=True))
        else:
            ranks.append(_judge_applied(session.rank, second, iteration))
    return ControlResult(iteration, tuple(ranks))


def _judge_applied(rank: int, answer: ControlAnswer, iteration: int) -> ControlledRank:
    """Return the result for a rank that has answered in both rounds."""
    if answer.refused:
        return ControlledRank(rank, None, answer.refused)
    reason = ""
    if answer.iteration > iteration:
        reason = f"it was past iteration {iteration} already"
    elif answer.iteration < iteration:
        reason = (
            "it had the order before the coordinator ended, and others were past that iteration"
        )
    return ControlledRank(rank, answer.iteration, reason, note=answer.note)


ROUND_TIMEOUT_S = 15.0
"""Longest wait in seconds for the answers of all ranks, in each of two rounds; agents report once a
second.
"""
FREEZE_TIMEOUT_S = 5.0
"""Longest wait in seconds for the agents of a job that is being frozen."""
STOPPING = "the coordinator stops"
_FREEZE_POLL_S = 0.1
_MAX_RESULTS = 256


@dataclass(slots=True)
class _RunningControl:
    """An order that is being carried out."""

    order: ControlOrder
    """The order as agents receive it now: without an iteration in the first round, with one in the
    second.
    """
    sessions: tuple[ControlledSession, ...]
    asked: dict[str, ControlAnswer] = field(default_factory=dict[str, ControlAnswer])
    applied: dict[str, ControlAnswer] = field(default_factory=dict[str, ControlAnswer])
    result: ControlResult | RankdumpError | None = None

    def has_all(self) -> bool:
        """Return whether every rank that is asked in this round has answered."""
        return all(
            each.session_id in self._answers for each in self.sessions if self._is_asked(each)
        )

    def add(self, answer: ControlAnswer) -> None:
        """Add an answer to the present order; answers to other orders are ignored."""
        known = {each.session_id for each in self.sessions}
        applies = not self._is_question
        if (answer.id, answer.applied) == (self.order.id, applies) and answer.session_id in known:
            self._answers[answer.session_id] = answer

    @property
    def _is_question(self) -> bool:
        return self.order.iteration is None

    @property
    def _answers(self) -> dict[str, ControlAnswer]:
        return self.asked if self._is_question else self.applied

    def _is_asked(self, session: ControlledSession) -> bool:
        if self._is_question:
            return not session.absence
        # In the second round only ranks that accepted the order in the first round have to answer.
        first = self.asked.get(session.session_id)
        return first is not None and not first.refused


class JobControl:
    """Control orders of all jobs; safe to use from several threads."""

    def __init__(
        self,
        freeze: Callable[[ControlOrder, int], Callable[[], FreezeReach]],
        *,
        round_timeout_s: float = ROUND_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`freeze` freezes an iteration of the order's job, and returns a function that returns
        which agents have done so.
        """
        self._freeze = freeze
        self._round_timeout_s, self._clock = round_timeout_s, clock
        self._changed = threading.Condition()
        self._running: dict[str, _RunningControl] = {}
        """Orders that are being carried out, by job id."""
        self._results: dict[str, ControlResult] = {}
        """Results by the id of the order."""
        self._is_stopping = False

    def control(
        self, order: ControlOrder, list_sessions: Callable[[], tuple[ControlledSession, ...]]
    ) -> ControlResult:
        """Carry out an order, and wait for the result; repeating the same order does not carry it
        out again.

        RejectedError while another order changes the same job.
        """
        with self._changed:
            known = self._results.get(order.id)
            if known is not None:
                return known
            running = self._running.get(order.job_id)
            if running is not None:
                return self._wait_for(running, order)
            running = _RunningControl(order, list_sessions())
            self._running[order.job_id] = running
            try:
                result = self._run(running)
                running.result = remember(self._results, order.id, result, _MAX_RESULTS)
                return result
            finally:
                if running.result is None:
                    running.result = UnavailableError(STOPPING)
                del self._running[order.job_id]
                self._changed.notify_all()

    def stop(self, grace_s: float = 0.0) -> None:
        """End all orders: their callers repeat them at the next coordinator.

        Orders that ranks may have received get `grace_s` seconds to finish.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._is_given_out, grace_s)
            self._is_stopping = True
            self._changed.notify_all()

    def list_orders(self) -> tuple[ControlOrder, ...]:
        """Return the orders that agents should relay to their ranks now."""
        if not self._running:  # without the lock, because this is called for every report
            return ()
        with self._changed:
            return tuple(each.order for each in self._running.values())

    def add_answers(self, answers: Sequence[ControlAnswer]) -> None:
        """Add answers of ranks, which an agent reports repeatedly."""
        if not answers:
            return
        with self._changed:
            for answer in answers:
                running = self._running.get(answer.job_id)
                if running is not None:
                    running.add(answer)
            self._changed.notify_all()

    @property
    def _is_given_out(self) -> bool:
        return any(each.order.iteration is not None for each in self._running.values())

    def _wait_for(self, running: _RunningControl, order: ControlOrder) -> ControlResult:
        if running.order.id != order.id:
            raise RejectedError(
                f"job {order.job_id!r} is being controlled by somebody else: try again in a moment"
            )
        self._changed.wait_for(lambda: running.result is not None, 3 * self._round_timeout_s)
        result = running.result
        if isinstance(result, ControlResult):
            return result
        raise result or UnavailableError("the control of the job takes too long")

    def _freeze_job(self, running: _RunningControl, iteration: int | None) -> ControlResult:
        """Freeze an iteration, and wait until every agent has frozen it or has said why not."""
        reach = FreezeReach()
        if iteration is not None:
            find_reach = self._freeze(running.order, iteration)
            until_s = self._clock() + FREEZE_TIMEOUT_S
            while self._clock() < until_s and not self._is_stopping:
                reach = find_reach()
                if 0 < reach.agents <= reach.frozen_agents:
                    break
                # Without the lock, because every report needs the lock.
                self._changed.wait(_FREEZE_POLL_S)
        unreached = {rank: each.reason for each in reach.unreached for rank in each.ranks}
        return judge_freeze(running.sessions, running.asked, unreached, iteration)

    def _run(self, running: _RunningControl) -> ControlResult:
        begun_s = self._clock()
        self._wait_for_answers(running)
        round_s = self._clock() - begun_s
        able = [each for each in running.asked.values() if not each.refused]
        if running.order.action is ControlAction.FREEZE:
            return self._freeze_job(running, max((each.iteration for each in able), default=None))
        iteration = choose_iteration(able, round_s=round_s) if able else None
        if iteration is not None:
            running.order = replace(running.order, iteration=iteration)
            self._wait_for_answers(running)
        return judge_ranks(
            running.sessions,
            running.asked,
            running.applied,
            iteration,
            waited_s=self._round_timeout_s,
        )

    def _wait_for_answers(self, running: _RunningControl) -> None:
        """Wait for the answers of a round; UnavailableError when the coordinator stops."""
        self._changed.wait_for(
            lambda: self._is_stopping or running.has_all(), self._round_timeout_s
        )
        if self._is_stopping:
            raise UnavailableError(STOPPING)
