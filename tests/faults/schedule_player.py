"""Player of a schedule in real time on a deployment; counts the faults that took effect."""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeAlias

from faults.control_page import PLACES
from faults.deployment import AgentProcess, FaultDeployment, ManagedProcess
from faults.descriptor_limit import DescriptorLimit
from faults.values import ScheduledFault

from rankdump._cli.daemon_client import freeze_job
from rankdump.control import set_iterations
from rankdump.errors import RankdumpError

LOOK_S = 0.02
_TRIES = 40
_LONGEST = 1.5
"""Longest duration of a run, as a multiple of the requested one."""
_RESTART_S = 0.3
_AGAIN_S = 0.4
_EXCUSED_S = 2.0
_GAVE_UP = (1, 2)
_DAY_US = 86_400_000_000
_STEPS_US = (-1_000_000, 1_000_000, -3_600_000_000, 3_600_000_000, -_DAY_US, _DAY_US)
_EIO_CALLS = ("write", "fsync", "rename", "open", "statvfs", "sqlite", "link", "mkdir")
"""Calls that fail in turn; a call that is not made in the window is tried again."""

_ALL_ITERATIONS = ("all", f"0-{1 << 40}")
"""The same iterations in two spellings, which are two plans."""

Heal: TypeAlias = Callable[[], bool]
"""Ends a fault; returns whether it happened."""


class SchedulePlayer:
    """Plays the faults of one run."""

    def __init__(
        self,
        deployment: FaultDeployment,
        faults: Sequence[ScheduledFault],
        *,
        say: Callable[[str], None],
    ) -> None:
        self._deployment, self._say = deployment, say
        self._order = itertools.count()
        self._due = [(fault.at_s, next(self._order), fault, 0) for fault in faults]
        heapq.heapify(self._due)
        self._healing: list[tuple[float, int, ScheduledFault, int, Heal]] = []
        self._ended_s: dict[str, float] = {}
        self.happened: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()
        self.ends: list[str] = []
        """Processes that ended by themselves."""
        self.frozen: set[str] = set()
        """Frozen trees that agents have answered with."""
        self._start_s = 0.0
        self._excused_s = 0.0
        """Processes started before this may exit at once: their state folder was unusable."""

    def play(self, seconds: float) -> None:
        """Play all faults, then end them; longer on a machine too slow for the schedule."""
        self._start_s = time.monotonic()
        said = 0
        while (now_s := time.monotonic() - self._start_s) < _LONGEST * seconds:
            self._step(now_s)
            if now_s >= seconds and not self._due and not self._healing:
                break
            if now_s >= said + 1:
                said = int(now_s)
                done = sum(self.happened.values())
                self._say(f"{said:4d} s  {done} faults, {len(self._due)} to come")
            time.sleep(LOOK_S)
        while self._healing:
            self._heal(float("inf"), last=True)
        for _, _, fault, _ in self._due:
            self.missed[fault.kind.value] += 1
        self._due.clear()

    def look_after(self) -> None:
        """Restart processes that have ended."""
        now_s = time.monotonic()
        for process in self._deployment.processes:
            if process.alive:
                process.was_up = process.was_up or process.up
                continue
            if not process.wanted:
                continue
            if process.name not in self._ended_s:
                self._ended_s[process.name] = now_s
                if not process.killed and process.popen is not None:
                    at_s = now_s - self._start_s
                    code = process.popen.returncode
                    if code in _GAVE_UP and self._is_excused(process, now_s):
                        continue
                    self.ends.append(f"{process.name} ended by itself with {code} at {at_s:.1f} s")
            elif now_s - self._ended_s[process.name] > _RESTART_S:
                del self._ended_s[process.name]
                process.start()

    def _is_excused(self, process: ManagedProcess, now_s: float) -> bool:
        """Return whether it may have given up: on a slow machine a start outlasts its reason."""
        began_s = now_s if process.was_up else process.started_s
        return began_s < self._excused_s

    def _step(self, now_s: float) -> None:
        self.look_after()
        self._heal(now_s)
        while self._due and self._due[0][0] <= now_s:
            _, _, fault, tries = heapq.heappop(self._due)
            heal = self._begin(fault)
            if heal is None:
                self._again(now_s, fault, tries)
            else:
                until_s = now_s + fault.lasts_s
                heapq.heappush(self._healing, (until_s, next(self._order), fault, tries, heal))

    def _heal(self, now_s: float, *, last: bool = False) -> None:
        while self._healing and self._healing[0][0] <= now_s:
            _, _, fault, tries, heal = heapq.heappop(self._healing)
            happened = False
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                happened = heal()
            if happened:
                self.happened[fault.kind.value] += 1
            elif last:
                self.missed[fault.kind.value] += 1
            else:
                self._again(now_s, fault, tries)

    def _again(self, now_s: float, fault: ScheduledFault, tries: int) -> None:
        """Play it later, and against another one."""
        if tries >= _TRIES:
            self.missed[fault.kind.value] += 1
            return
        other = ScheduledFault(
            now_s + _AGAIN_S, fault.kind, fault.target + 1, fault.lasts_s, fault.amount + 1
        )
        heapq.heappush(self._due, (other.at_s, next(self._order), other, tries + 1))

    def _begin(self, fault: ScheduledFault) -> Heal | None:
        """Begin a fault; None when there is no target now."""
        try:
            return getattr(self, f"_{fault.kind.value}")(fault)
        except (ProcessLookupError, FileNotFoundError):
            return None

    # -- processes

    def _kill_rank(self, fault: ScheduledFault) -> Heal | None:
        return _killed(self._deployment.ranks[fault.target % len(self._deployment.ranks)])

    def _kill_agent(self, fault: ScheduledFault) -> Heal | None:
        return _killed(self._agent(fault))

    def _kill_coordinator(self, fault: ScheduledFault) -> Heal | None:
        return _killed(self._deployment.coordinator)

    def _kill_worker(self, fault: ScheduledFault) -> Heal | None:
        many = [agent for agent in self._deployment.agents if agent.workers > 1]
        agent = many[fault.target % len(many)] if many else self._agent(fault)
        pids = agent.worker_pids() if agent.settled else []
        if not pids:
            return None
        if agent.workers < 2:
            return _killed(agent)
        os.kill(pids[fault.amount % len(pids)], signal.SIGKILL)
        return _happened

    def _stopped(self, fault: ScheduledFault) -> Heal | None:
        process = self._deployment.processes[fault.target % len(self._deployment.processes)]
        if not process.settled:
            return None
        pids = process.worker_pids() if isinstance(process, AgentProcess) else [process.pid]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)

        def heal() -> bool:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            return True

        return heal

    def _descriptors(self, fault: ScheduledFault) -> Heal | None:
        agent = self._agent(fault)
        pids = agent.worker_pids() if agent.settled else []
        if not pids:
            return None
        limit = DescriptorLimit(pids[fault.amount % len(pids)])
        self._excuse(fault)
        try:
            limit.exhaust()
        except (ProcessLookupError, ValueError):  # it died at this moment
            return None

        def heal() -> bool:
            limit.give_back()
            # The layer counts only some of the calls that failed.
            return True

        return heal

    def _freeze(self, fault: ScheduledFault) -> Heal | None:
        agent = self._agent(fault)
        if not agent.settled:
            return None
        trees: list[str] = []

        def ask() -> None:
            # An agent may be killed meanwhile, and has rings to freeze every few seconds only.
            with contextlib.suppress(RankdumpError):
                trees.extend(freeze_job(agent.address, agent.job_id, "", timeout_s=30).trees)

        asking = threading.Thread(target=ask, daemon=True, name="rig-freeze")
        asking.start()

        def heal() -> bool:
            asking.join(2.0)
            self.frozen.update(trees)
            return bool(trees)

        return heal

    def _control(self, fault: ScheduledFault) -> Heal | None:
        """Change the plan of a job in a way that selects all tensors, as the plan before it."""
        coordinator, job_id = self._deployment.coordinator, self._agent(fault).job_id
        if not coordinator.settled:
            return None
        iterations = _ALL_ITERATIONS[fault.amount % len(_ALL_ITERATIONS)]
        changed: list[int] = []

        def ask() -> None:
            with contextlib.suppress(RankdumpError):
                result = set_iterations(job_id, iterations, coordinator=coordinator.address)
                changed.extend(each.rank for each in result.ranks if each.iteration is not None)

        asking = threading.Thread(target=ask, daemon=True, name="rig-control")
        asking.start()

        def heal() -> bool:
            asking.join(2.0)
            return bool(changed)

        return heal

    # -- connections

    def _cut(self, fault: ScheduledFault) -> Heal | None:
        proxy = self._deployment.proxies[fault.target % len(self._deployment.proxies)]
        return _happened if proxy.cut() else None

    def _delay(self, fault: ScheduledFault) -> Heal | None:
        proxy = self._deployment.proxies[fault.target % len(self._deployment.proxies)]
        if not proxy.connections:
            return None
        proxy.delay(0.02 + fault.amount % 200 / 1000)
        return lambda: proxy.delay(0) is None

    def _hole(self, fault: ScheduledFault) -> Heal | None:
        proxy = self._deployment.proxies[fault.target % len(self._deployment.proxies)]
        if not proxy.connections:
            return None
        proxy.hole(True)

        def heal() -> bool:
            proxy.hole(False)
            proxy.cut()
            return True

        return heal

    def _tampered(self, fault: ScheduledFault) -> Heal | None:
        tamperers = [rank.tamperer for rank in self._deployment.ranks if rank.tamperer is not None]
        tamperer = tamperers[fault.target % len(tamperers)]
        before, until_s = tamperer.done[fault.kind], time.monotonic() + 1.0
        tamperer.want(fault.kind)

        def heal() -> bool:
            while tamperer.done[fault.kind] == before and time.monotonic() < until_s:
                time.sleep(LOOK_S)
            tamperer.forget(fault.kind)
            return tamperer.done[fault.kind] > before

        return heal

    _doubled = _swapped = _flipped_chunk = _tampered

    def _flipped_slab(self, fault: ScheduledFault) -> Heal | None:
        ranks = [rank for rank in self._deployment.ranks if rank.tamperer is None]
        rank = ranks[fault.target % len(ranks)]
        if not rank.settled:
            return None
        before, until_s = rank.control.hits("flip"), time.monotonic() + 1.0
        rank.control.flip_at = PLACES[fault.amount % len(PLACES)]
        rank.control.flips = 1

        def heal() -> bool:
            while rank.control.hits("flip") == before and time.monotonic() < until_s:
                time.sleep(LOOK_S)
            rank.control.flips = 0
            return rank.control.hits("flip") > before

        return heal

    # -- disks and clocks

    def _eio(self, fault: ScheduledFault) -> Heal | None:
        agent = self._agent(fault)
        if not agent.settled:
            return None
        call = _EIO_CALLS[fault.amount % len(_EIO_CALLS)]
        before = agent.control.hits(call)
        agent.control.fail(call, errno.EIO, 300)
        if call == "sqlite":
            self._excuse(fault)

        def heal() -> bool:
            agent.control.fail(call, 0, 0)
            return agent.control.hits(call) > before

        return heal

    def _stall(self, fault: ScheduledFault) -> Heal | None:
        agent = self._agent(fault)
        if not agent.settled:
            return None
        before = agent.control.hits("stall")
        agent.control.stalled = True

        def heal() -> bool:
            agent.control.stalled = False
            return agent.control.hits("stall") > before

        return heal

    def _clock(self, fault: ScheduledFault) -> Heal | None:
        process = self._deployment.processes[fault.target % len(self._deployment.processes)]
        if not process.settled:
            return None
        before = process.control.hits("clock")
        process.control.clock_us = _STEPS_US[fault.amount % len(_STEPS_US)]

        def heal() -> bool:
            process.control.clock_us = 0
            return process.control.hits("clock") > before

        return heal

    def _enospc(self, fault: ScheduledFault) -> Heal | None:
        disk = self._agent(fault).tree_disk
        full = disk.take_bytes()
        return lambda: disk.give_back() is None and full

    def _inodes(self, fault: ScheduledFault) -> Heal | None:
        disk = self._agent(fault).tree_disk
        full = disk.take_inodes()
        return lambda: disk.give_back() is None and full

    def _state_full(self, fault: ScheduledFault) -> Heal | None:
        disks = [
            *(agent.state_disk for agent in self._deployment.agents),
            self._deployment.coordinator.disk,
        ]
        disk = disks[fault.target % len(disks)]
        full = disk.take_bytes()
        self._excuse(fault)
        return lambda: disk.give_back() is None and full

    def _excuse(self, fault: ScheduledFault) -> None:
        self._excused_s = max(self._excused_s, time.monotonic() + fault.lasts_s + _EXCUSED_S)

    def _agent(self, fault: ScheduledFault) -> AgentProcess:
        return self._deployment.agents[fault.target % len(self._deployment.agents)]


def _happened() -> bool:
    return True


def _killed(process: ManagedProcess) -> Heal | None:
    if not process.settled:
        return None
    process.kill()
    return _happened
