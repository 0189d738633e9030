"""Removes old iterations by age and size: whole ones, those that ended first, none that is open."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

from rankdump.contract.errors import DamagedError, RankdumpError
from rankdump.contract.retired import Retired
from rankdumpd.agent import vet
from rankdumpd.agent.ledger import Ledger
from rankdumpd.agent.policy import Policy, why_retired
from rankdumpd.agent.registry import Registry
from rankdumpd.agent.retain.removing import Part, files_of, remove, room_of
from rankdumpd.agent.sessions.outlet import outlet_of
from rankdumpd.agent.usage import Taken, Usage
from rankdumpd.agent.values import Ended, Retiring
from rankdumpd.meters import Meters

LOOK_S = 30.0
Told: TypeAlias = "Callable[[str, Mapping[str, object]], None]"
"""Hears what was done, and the particulars."""

_log = logging.getLogger(__name__)


def _now_us() -> int:
    return time.time_ns() // 1000


def nobody(_what: str, _fields: Mapping[str, object]) -> None:
    """Hear nothing."""


class Keeper:
    """Looks for what is to be removed, in a thread of its own; what it began, it finishes."""

    def __init__(
        self,
        ledger: Ledger,
        registry: Registry,
        usage: Usage,
        policy: Callable[[], Policy],
        *,
        told: Told = nobody,
        meters: Meters | None = None,
        now_us: Callable[[], int] = _now_us,
    ) -> None:
        """`told` hears what was removed; `now_us` is since the epoch."""
        self._ledger, self._registry, self._usage = ledger, registry, usage
        self._policy, self._told, self._now_us = policy, told, now_us
        self._meters = meters or Meters()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._problem = ""

    def start(self) -> None:
        """Begin to look."""
        self._thread = threading.Thread(target=self._run, name="rankdumpd-keeper", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 60.0) -> bool:
        """Leave what is not done to the next process; return whether the thread has ended."""
        self._stopping.set()
        if self._thread:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    def findings(self) -> list[str]:
        """Return why iterations stay that should have been removed."""
        return [f"old iterations are not removed: {self._problem}"] if self._problem else []

    def look(self) -> int:
        """Finish what was begun, then remove what is due; return how many iterations that were."""
        problems: list[str] = []
        for left in self._ledger.retention.unfinished():
            self._tried(partial(self._finish, left), problems)
        removed = 0
        policy = self._policy()
        for ended in self._ledger.retention.oldest() if not policy.retains_all else ():
            age_s = (self._now_us() - ended.ended_us) / 1e6
            why = why_retired(policy, age_s, self._usage.total)
            if not why or self._stopping.is_set():
                break
            retire = partial(self._retire, ended, why)
            removed += bool(self._tried(retire, problems))
        self._say("; ".join(dict.fromkeys(problems)))
        return removed

    def _tried(self, step: Callable[[], bool], problems: list[str]) -> bool:
        """Take a step; one that fails is tried again later and keeps no other from being taken."""
        try:
            return step()
        except (OSError, RankdumpError) as error:
            problems.append(str(error))
            return False

    def _say(self, problem: str) -> None:
        if problem and problem != self._problem:
            _log.error("old iterations are not removed: %s", problem)
        self._problem = problem

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                while self.look() and not self._stopping.is_set():
                    pass
            except (sqlite3.Error, RankdumpError) as error:
                self._say(str(error))
            self._stopping.wait(LOOK_S)

    def _retire(self, ended: Ended, why: str) -> bool:
        """Remove all parts of an iteration; return whether there were any."""
        now_us = self._now_us()
        parts = [
            self._part(session_id, ended.iteration, now_us, why)
            for session_id in self._ledger.retention.parts(ended)
        ]
        sizes = room_of((part.tree, files_of(part)) for part in parts)
        begun = [_begun(part, size) for part, size in zip(parts, sizes, strict=True)]
        if not begun or not self._ledger.retention.begin(begun):
            return False
        for part, size in zip(parts, sizes, strict=True):
            self._usage.add(Taken(ended.job_id, str(part.tree.root), -size))
        return all(self._finish(each) for each in begun)

    def _finish(self, begun: Retiring) -> bool:
        about = begun.about
        why = str(about.get("why", ""))
        part = self._part(begun.session_id, begun.iteration, begun.began_us, why)
        part.hold.take(make=False)
        try:
            for _ in remove(part, shared=self._shared(part)):
                if self._stopping.is_set():
                    return False
        finally:
            part.hold.let_go()
        self._ledger.forget(begun.session_id, begun.iteration)
        self._ledger.retention.done(begun)
        self._usage.retired(part.retired.job_id)
        self._meters.add("rankdump_agent_retired_iterations_total")
        root = str(part.tree.root)
        self._told("retired", {**about, "session": begun.session_id, "root": root})
        _log.info("rank %d: iteration %d is removed", part.retired.rank, begun.iteration)
        return True

    def _part(self, session_id: str, iteration: int, at_us: int, why: str) -> Part:
        row = self._ledger.find(session_id)
        if row is None:
            raise DamagedError(f"session {session_id!r} is not in the ledger")
        request = row.request
        outlet = outlet_of(request, vet.plan_of(request))
        retired = Retired(request.job_id, session_id, request.rank, iteration, at_us, why)
        return Part(outlet.tree, outlet.hold, outlet.layout, outlet.stand, retired)

    def _shared(self, part: Part) -> bool:
        """Return whether a rank of another job may write to the folders of this one."""
        return any(
            session.outlet.tree.root == part.tree.root
            and session.request.rank == part.retired.rank
            and session.request.job_id != part.retired.job_id
            and not session.over
            for session in self._registry.all()
        )


def _begun(part: Part, size: int) -> Retiring:
    retired = part.retired
    about = {
        "job": retired.job_id,
        "rank": retired.rank,
        "iteration": retired.iteration,
        "bytes": size,
        "why": retired.why,
    }
    return Retiring(retired.session_id, retired.iteration, size, retired.at_us, about)
