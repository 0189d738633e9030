"""Freezes of one job on all its agents: the first freeze is relayed to each agent. No I/O; the
clock is an argument, and the owner holds the lock.

Nothing is stored: agents report for a minute what they have frozen, so a coordinator that is
restarted in this time learns it again.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from rankdump._core.freeze_record import (
    FreezeReach,
    FrozenCause,
    JobFreeze,
    RelayedFreeze,
    UnreachedAgent,
    describe_cause,
)
from rankdump._wire.black_box_messages import (
    MAX_LATER_CAUSES,
    MAX_UNREACHED_AGENTS,
    MAX_UNREACHED_RANKS,
)

RELAYED_S = 60.0
"""Seconds for which a freeze is relayed to the agents of its job."""
MAX_KNOWN_FREEZES = 64
"""Largest number of freezes that a job remembers; a remembered freeze does not begin again."""
ANSWER_TIME_S = 1.5
"""Seconds within which an agent that reports once a second has received a freeze and reported it;
an agent that has not is named in the result.
"""
REACH_INTERVAL_S = 0.5
"""Seconds between two checks which agents have frozen their ranks."""

FreezeKey = tuple[str, int, int]
"""Job id, attempt and iteration of a freeze."""

_logger = logging.getLogger(__name__)


def begins_freeze(
    freeze: JobFreeze,
    known: Collection[FreezeKey],
    current: Sequence[JobFreeze],
    seen: Collection[FreezeKey],
) -> bool:
    """Return whether a freeze is a new one that all agents of the job should join.

    `known` contains the keys of all freezes so far, `current` the freezes that are being relayed,
    the latest last, and `seen` the keys that the finder of `freeze` knew. If the finder did not
    know the current freeze of its attempt, `freeze` is a part of that one, which the finder will
    join.
    """
    if freeze.key in known:
        return False
    own = [each for each in current if each.attempt == freeze.attempt]
    return not own or own[-1].key in seen


class AgentRanks(NamedTuple):
    """An agent with ranks of a job."""

    host: str
    ranks: tuple[int, ...]
    """Ranks whose sessions have not ended."""
    silence: str
    """Sentence on an agent that does not report; empty for an agent that does."""


def measure_reach(
    agents: Mapping[str, AgentRanks], answers: Mapping[str, str], *, is_due: bool
) -> FreezeReach:
    """Return which agents a freeze has reached.

    `answers` contains, for each agent that has reported the freeze, why it has not frozen its
    ranks, or an empty text. Agents that have not frozen their ranks are named once all agents have
    answered, or if `is_due`.
    """
    late = {name: agent for name, agent in agents.items() if answers.get(name, "late")}
    is_due = is_due or answers.keys() >= late.keys()
    unreached = tuple(
        UnreachedAgent(
            agent.host,
            agent.ranks[:MAX_UNREACHED_RANKS],
            answers.get(name) or agent.silence or "its agent has not answered yet",
        )
        for name, agent in islice(late.items(), MAX_UNREACHED_AGENTS if is_due else 0)
    )
    return FreezeReach(len(agents), len(agents) - len(late), unreached)


@dataclass(slots=True)
class _KnownFreeze:
    """One freeze of the job, with the answers of agents."""

    freeze: JobFreeze
    since_s: float
    answers: dict[str, str] = field(default_factory=dict[str, str])
    """For each agent, why it has not frozen its ranks; empty if it has."""
    reach: FreezeReach = field(default_factory=FreezeReach)
    reach_s: float = float("-inf")
    """Time at which `reach` was measured."""
    later: list[FrozenCause] = field(default_factory=list[FrozenCause])
    """Causes that the coordinator has found since the freeze began."""

    def has_cause(self, cause: FrozenCause) -> bool:
        """Return whether a cause is among the causes of this freeze, at whatever time
        it was found.
        """
        return any(each.subject == cause.subject for each in (self.freeze.cause, *self.later))


class JobFreezes:
    """All known freezes of one job."""

    def __init__(self) -> None:
        self._known: dict[FreezeKey, _KnownFreeze] = {}
        """Freezes by key, the latest last."""

    def add_reported(self, agent_id: str, freezes: Sequence[JobFreeze], *, now_s: float) -> None:
        """Add the freezes of this job that an agent reports."""
        seen = {freeze.key for freeze in freezes}
        for freeze in freezes:
            self.add(dataclasses.replace(freeze, refusal=""), now_s=now_s, seen=seen)
            if freeze.key in self._known:
                self._known[freeze.key].answers[agent_id] = freeze.refusal

    def add(self, freeze: JobFreeze, *, now_s: float, seen: Collection[FreezeKey] = ()) -> bool:
        """Add a freeze; return whether it is a new one, as `begins_freeze` decides."""
        current = [each.freeze for each in self._iter_current(now_s)]
        if not begins_freeze(freeze, self._known, current, seen):
            return False
        self._known[freeze.key] = _KnownFreeze(freeze, now_s)
        while len(self._known) > MAX_KNOWN_FREEZES:
            del self._known[next(iter(self._known))]
        # Logged as information only, because the agents log it as a warning.
        _logger.info(
            "job %s: its black boxes are frozen on all hosts: %s",
            freeze.job_id,
            describe_cause(freeze.cause),
            extra={"job": freeze.job_id},
        )
        return True

    def add_alarm(self, freeze: JobFreeze, *, now_s: float) -> bool:
        """Add a freeze that the coordinator itself found; return whether it begins a new freeze.

        Otherwise its cause becomes a later cause of the freeze that is being relayed. An alarm that
        goes on is found again and again, and counts once.
        """
        own = [e for e in self._known.values() if e.freeze.attempt == freeze.attempt]
        if any(each.has_cause(freeze.cause) for each in own):
            return False
        if self.add(freeze, now_s=now_s):
            return True
        current = [each for each in own if now_s - each.since_s < RELAYED_S]
        if current and len(current[-1].later) < MAX_LATER_CAUSES:
            current[-1].later.append(freeze.cause)
        return False

    def request(self, freeze: JobFreeze, *, now_s: float) -> None:
        """Add a freeze that a person asked for, besides the freezes that are being relayed."""
        current = [each.freeze.key for each in self._iter_current(now_s)]
        self.add(freeze, now_s=now_s, seen=current)

    def find_reach(self, key: FreezeKey) -> FreezeReach:
        """Return which agents a freeze has reached; an empty reach for an unknown freeze."""
        known = self._known.get(key)
        return known.reach if known else FreezeReach()

    def list_relayed(
        self, list_agents: Callable[[int], Mapping[str, AgentRanks]], *, now_s: float
    ) -> tuple[RelayedFreeze, ...]:
        """Return the freezes that the agents of the job should join, the earliest first.

        `list_agents` returns the agents with ranks of an attempt.
        """
        current = tuple(self._iter_current(now_s))
        for each in current:
            if now_s - each.reach_s >= REACH_INTERVAL_S:
                is_due = now_s - each.since_s >= ANSWER_TIME_S
                agents = list_agents(each.freeze.attempt)
                each.reach = measure_reach(agents, each.answers, is_due=is_due)
                each.reach_s = now_s
        return tuple(RelayedFreeze(each.freeze, each.reach, tuple(each.later)) for each in current)

    def _iter_current(self, now_s: float) -> Iterator[_KnownFreeze]:
        return (each for each in self._known.values() if now_s - each.since_s < RELAYED_S)
