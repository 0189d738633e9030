"""The front, put together: workers below, one address above."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import grpc

from rankdump.contract.errors import ConfigError, UnavailableError
from rankdump.contract.exchange import SessionRequest
from rankdump.contract.room import MetricSample
from rankdump.wire.channel import Credentials
from rankdump.wire.v1 import agent_pb2_grpc
from rankdumpd import machine
from rankdumpd.agent.ledger.connection import sole_owner
from rankdumpd.agent.servicer import SERVICE_NAME
from rankdumpd.agent.slabs.cap import share_out
from rankdumpd.agent.slabs.place import group_of
from rankdumpd.front import shares
from rankdumpd.front.crew import Crew
from rankdumpd.front.homes import Home, bring_home, sole_runtime
from rankdumpd.front.metering import Sums
from rankdumpd.front.servicer import FrontServicer
from rankdumpd.front.sharding import worker_of
from rankdumpd.front.worker import Worker
from rankdumpd.group_folder import make_folder
from rankdumpd.lifecycle import Room
from rankdumpd.meters import Meters
from rankdumpd.required_files import RequiredFiles
from rankdumpd.server import socket_path
from rankdumpd.settings import AgentSettings, Settings, environment, without_settings
from rankdumpd.tls import Certificates

_log = logging.getLogger(__name__)

_PATIENCE_S = 10.0
_NOT_INHERITED = "NOTIFY_SOCKET"
# A worker drains as long as its front does, and has its calls to end and its files to close then.
_LEAVE_S = 8.0


class Front(Room):
    """An agent of several workers; it owns the state folder from when it is made until `stop`."""

    # What its workers have, and as long again for one that hangs.
    leave_s = 2 * Room.leave_s
    service_names: tuple[str, ...] = (SERVICE_NAME,)

    def __init__(
        self,
        every: Settings,
        environ: Mapping[str, str],
        *,
        meters: Meters | None = None,
        required: RequiredFiles | None = None,
    ) -> None:
        """Give `environ` to the workers, with settings of their own; `required` knows what is gone
        of this process's own files.
        """
        self._every = every
        self._settings = settings = every.agent
        # The longest of all the paths there will be.
        socket_path(shares.beside(settings.listen, settings.workers - 1))
        self._group = group_of(settings.runtime_group)
        self._home = home_of(settings)
        self._guards = [sole_owner(self._home.state_dir)]
        if self._home.runtime_dir and settings.slab_bytes:
            self._guards.append(self._own_runtime(self._home.runtime_dir))
        self._memory_bytes = share_out(
            settings.memory_bytes,
            machine_bytes=machine.memory_bytes(),
            queue_bytes=settings.queue_bytes,
            max_record_bytes=settings.max_record_bytes,
        ).total_bytes
        self._workers = [self._worker(index, environ) for index in range(settings.workers)]
        tls = every.tls
        shown = Certificates(tls) if tls.on and self._home.runtime_dir is None else None
        self._crew = Crew(
            self._workers,
            Credentials(tls.ca, tls.certificate, tls.key),
            own_host=lambda: shown.material().hosts[0] if shown else "",
            required=required or RequiredFiles(),
        )
        self._draining = False
        self._meters = meters or Meters()
        self._sums, self._summing = Sums(), threading.Lock()

    def register(self, server: grpc.Server) -> None:
        """Add the agent's service to a server."""
        servicer = FrontServicer(self._crew, redirect=self._redirect, meters=self._meters)
        agent_pb2_grpc.add_AgentServiceServicer_to_server(servicer, server)

    def start(self) -> None:
        """Bring all sessions to their workers, start these and wait until they serve."""
        try:
            self._make_runtime_folders()
            bring_home(self._home, len(self._workers), group=self._group, patience_s=_PATIENCE_S)
            for worker in self._workers:
                worker.start()
            for worker in self._workers:
                worker.wait_ready()
        except BaseException:
            self.stop()
            raise

    def drain(self, timeout_s: float) -> int:
        """Let all workers drain at the same time; return what is left."""
        self._draining = True
        deadline_s = time.monotonic() + timeout_s + _LEAVE_S
        for worker in self._workers:
            worker.ask_to_drain()
        return sum(w.wait_over(max(0.0, deadline_s - time.monotonic())) for w in self._workers)

    def stop(self) -> None:
        """End all workers at once; may be repeated."""
        self._draining = True
        for worker in self._workers:
            worker.let_go()
        for worker in self._workers:
            worker.stop()
            folder = self._home.worker(worker.index).runtime_dir
            if folder:
                # Slabs that are needed stay, and so does their folder.
                with contextlib.suppress(OSError):
                    folder.rmdir()
        self._let_go()

    def samples(self) -> list[MetricSample]:
        """Return the numbers of all workers, as one agent's."""
        answers = self._crew.metrics()
        restarts = sum(worker.restarts for worker in self._workers)
        with self._summing:
            found = self._sums.of(answers)
        return [*found, MetricSample("rankdump_agent_worker_restarts_total", restarts)]

    def reload(self, settings: Settings) -> None:
        """Give each worker its part of new settings."""
        self._every, self._settings = settings, settings.agent
        for worker in self._workers:
            worker.give_settings(self._settings_of(worker.index))

    def fault(self) -> str:
        """Say which worker nobody would start again; what ails a worker is for itself to end."""
        return "; ".join(filter(None, (worker.fault() for worker in self._workers)))

    def brief(self) -> str:
        """Say how many workers serve."""
        return f"{self._crew.serving} of {len(self._workers)} workers serve"

    def _worker(self, index: int, environ: Mapping[str, str]) -> Worker:
        inherited = without_settings(environ)
        inherited.pop(_NOT_INHERITED, None)
        return Worker(
            index,
            folder=self._home.worker(index).state_dir,
            environ=inherited | self._settings_of(index),
        )

    def _settings_of(self, index: int) -> dict[str, str]:
        home = self._home.worker(index)
        share = shares.share_of(
            self._settings,
            index,
            state_dir=str(home.state_dir),
            runtime_dir=str(home.runtime_dir or ""),
            memory_bytes=self._memory_bytes,
            cores=machine.cores(),
        )
        return environment(dataclasses.replace(self._every, agent=share))

    def _own_runtime(self, folder: Path) -> int:
        try:
            return sole_runtime(folder, self._group)
        except ConfigError:
            self._let_go()
            raise

    def _let_go(self) -> None:
        while self._guards:
            guard = self._guards.pop()
            if guard >= 0:
                os.close(guard)

    def _make_runtime_folders(self) -> None:
        for worker in self._workers:
            folder = self._home.worker(worker.index).runtime_dir
            try:
                if folder:
                    make_folder(folder, self._group)
            except OSError as error:
                # The worker will find it out as well, and do without shared memory.
                _log.warning("%s cannot be made: %s", folder, error)

    def _redirect(self, request: SessionRequest) -> str:
        if self._draining:
            raise UnavailableError("the agent is stopping and takes no new sessions")
        index = worker_of(request.job_id, request.rank, len(self._workers))
        return shares.redirect_to(self._crew.address(index))


def home_of(settings: AgentSettings) -> Home:
    """Return where an agent of these settings keeps its own state and slabs."""
    socket = socket_path(settings.listen)
    runtime_dir = Path(settings.runtime_dir) if settings.runtime_dir else socket and socket.parent
    return Home(Path(settings.state_dir), runtime_dir if socket else None)


def bring_home_alone(settings: AgentSettings) -> None:
    """Take over what workers left, for an agent that has none now."""
    home = home_of(settings)
    if home.workers():
        guard = sole_owner(home.state_dir)
        try:
            group = group_of(settings.runtime_group)
            bring_home(home, 1, group=group, patience_s=_PATIENCE_S)
        finally:
            os.close(guard)
