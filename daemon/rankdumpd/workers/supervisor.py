"""Supervisor of the workers of one agent: gives each its share of the settings, starts and stops
them, redirects ranks to them and answers for all of them. It takes no frames itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import grpc

from rankdump._core.session_protocol import SessionGrant, SessionRequest
from rankdump._core.status import MetricSample
from rankdump._wire import session_messages, status_messages
from rankdump._wire.channel import TlsCredentials
from rankdump.errors import ConfigError, ProtocolError, RejectedError, UnavailableError
from rankdump.wire.v1 import agent_pb2, agent_pb2_grpc
from rankdumpd.agent.ingress.servicer import SERVICE_NAME, limit_drain_s
from rankdumpd.agent.ledger.database import lock_ledger_folder
from rankdumpd.agent.shm.slab_folder import find_group_id, share_memory
from rankdumpd.server import machine
from rankdumpd.server.error_status import abort_on_error
from rankdumpd.server.grpc_server import parse_socket_path
from rankdumpd.server.lifecycle import Component
from rankdumpd.server.metrics import MetricCounters
from rankdumpd.server.state_files import RequiredFiles, make_group_folder
from rankdumpd.server.tls import ServerCertificates
from rankdumpd.settings import AgentSettings, DaemonSettings, build_environment, strip_settings
from rankdumpd.workers.clients import WorkerClients, WorkerMetricSums
from rankdumpd.workers.session_migration import (
    StatePaths,
    lock_runtime_folder,
    migrate_sessions,
    select_worker,
)
from rankdumpd.workers.worker_process import WorkerProcess

MIN_WORKER_QUEUE_BYTES = 1 << 20


def build_worker_settings(
    settings: AgentSettings,
    index: int,
    *,
    state_dir: str,
    runtime_dir: str,
    memory_bytes: int,
    cores: int,
) -> AgentSettings:
    """Return the settings of one worker: its own places, and its part of all memory and cores."""
    workers = settings.workers
    queue_bytes = max(MIN_WORKER_QUEUE_BYTES, settings.queue_bytes // workers)
    return dataclasses.replace(
        settings,
        listen=build_worker_address(settings.listen, index),
        state_dir=state_dir,
        workers=1,
        encode_threads=max(1, (settings.encode_threads or cores) // workers),
        queue_bytes=queue_bytes,
        report_bytes=max(MIN_WORKER_QUEUE_BYTES, settings.report_bytes // workers),
        memory_bytes=max(queue_bytes, memory_bytes // workers),
        runtime_dir=runtime_dir,
        # Up to a whole one: as many ranks as may come do, where they are shared out evenly.
        max_sessions=-(-settings.max_sessions // workers),
        disk_bytes=_divide_limit(settings.disk_bytes, workers),
        job_bytes=_divide_limit(settings.job_bytes, workers),
        retain_bytes=_divide_limit(settings.retain_bytes, workers),
    )


def _divide_limit(limit_bytes: int, workers: int) -> int:
    """Return a worker's part of a limit; none of none, and never none of a limit."""
    return max(1, limit_bytes // workers) if limit_bytes else 0


def build_worker_address(listen: str, index: int) -> str:
    """Return where a worker listens: on a socket beside the public one, or any port."""
    if listen.startswith("unix:"):
        return f"{listen}.{index}"
    return f"{listen.rpartition(':')[0]}:0"


def build_redirect(address: str) -> str:
    """Return how a worker's address is told to a rank: what of it differs from the public one."""
    return address.rpartition("/" if address.startswith("unix:") else ":")[2]


class SupervisorServicer(agent_pb2_grpc.AgentServiceServicer):
    """Answers as an agent does, and takes no frames itself."""

    def __init__(
        self,
        crew: WorkerClients,
        *,
        redirect: Callable[[SessionRequest], str],
        meters: MetricCounters,
    ) -> None:
        self._crew, self._redirect, self._meters = crew, redirect, meters

    def OpenSession(  # noqa: N802 - the name is the generated base class's
        self, request: agent_pb2.OpenSessionRequest, context: grpc.ServicerContext
    ) -> agent_pb2.OpenSessionResponse:
        """Send a rank on to its worker."""
        with abort_on_error(context, self._meters):
            redirect = self._redirect(session_messages.session_request_from_wire(request))
            grant = SessionGrant(b"", 0, 0, redirect=redirect)
            return session_messages.session_grant_to_wire(grant)

    def Push(  # noqa: N802 - the name is the generated base class's
        self, request_iterator: Iterator[agent_pb2.PushRequest], context: grpc.ServicerContext
    ) -> Iterator[agent_pb2.PushResponse]:
        """Refuse a rank that did not go where it was sent."""
        with abort_on_error(context, self._meters):
            raise RejectedError(
                "this agent has several workers, and this client follows no redirect: it is older "
                "than the agent"
            )
        return iter(())

    def Status(  # noqa: N802 - the name is the generated base class's
        self, request: agent_pb2.AgentStatusRequest, context: grpc.ServicerContext
    ) -> agent_pb2.AgentStatusResponse:
        """Say how everything stands with all workers."""
        return agent_pb2.AgentStatusResponse(
            view=status_messages.view_to_wire(self._crew.collect_view())
        )

    def Control(  # noqa: N802 - the name is the generated base class's
        self, request: agent_pb2.ControlRequest, context: grpc.ServicerContext
    ) -> agent_pb2.ControlResponse:
        """Pass a drain or a pin on to all workers."""
        with abort_on_error(context, self._meters):
            if request.HasField("pin"):
                self._crew.pin_job(request.pin)
                return agent_pb2.ControlResponse()
            if not request.HasField("drain"):
                raise ProtocolError("control without an action")
            left = self._crew.drain_workers(limit_drain_s(request.drain))
            return agent_pb2.ControlResponse(drained=left == 0, queued_records=left)


_logger = logging.getLogger(__name__)

_MIGRATION_TIMEOUT_S = 10.0
_NOTIFY_VARIABLE = "NOTIFY_SOCKET"
# A worker drains as long as its front does, and has its calls to end and its files to close then.
_WORKER_STOP_TIMEOUT_S = 8.0


class WorkerSupervisor(Component):
    """An agent of several workers; it owns the state folder from when it is made until `stop`."""

    # What its workers have, and as long again for one that hangs.
    leave_s = 2 * Component.leave_s
    service_names: tuple[str, ...] = (SERVICE_NAME,)

    def __init__(
        self,
        every: DaemonSettings,
        environ: Mapping[str, str],
        *,
        meters: MetricCounters | None = None,
        required: RequiredFiles | None = None,
    ) -> None:
        """Give `environ` to the workers, with settings of their own; `required` knows what is gone
        of this process's own files.
        """
        self._every = every
        self._settings = settings = every.agent
        # The longest of all the paths there will be.
        parse_socket_path(build_worker_address(settings.listen, settings.workers - 1))
        self._group = find_group_id(settings.runtime_group)
        self._home = find_state_paths(settings)
        self._guards = [lock_ledger_folder(self._home.state_dir)]
        if self._home.runtime_dir and settings.slab_bytes:
            self._guards.append(self._own_runtime(self._home.runtime_dir))
        self._memory_bytes = share_memory(
            settings.memory_bytes,
            machine_bytes=machine.read_memory_bytes(),
            queue_bytes=settings.queue_bytes,
            max_record_bytes=settings.max_record_bytes,
        ).total_bytes
        self._workers = [self._worker(index, environ) for index in range(settings.workers)]
        tls = every.tls
        shown = ServerCertificates(tls) if tls.on and self._home.runtime_dir is None else None
        self._crew = WorkerClients(
            self._workers,
            TlsCredentials(tls.ca, tls.certificate, tls.key),
            own_host=lambda: shown.read_material().hosts[0] if shown else "",
            required=required or RequiredFiles(),
        )
        self._draining = False
        self._meters = meters or MetricCounters()
        self._sums, self._summing = WorkerMetricSums(), threading.Lock()

    def register(self, server: grpc.Server) -> None:
        """Add the agent's service to a server."""
        servicer = SupervisorServicer(self._crew, redirect=self._redirect, meters=self._meters)
        agent_pb2_grpc.add_AgentServiceServicer_to_server(servicer, server)

    def start(self) -> None:
        """Bring all sessions to their workers, start these and wait until they serve."""
        try:
            self._make_runtime_folders()
            migrate_sessions(
                self._home, len(self._workers), group=self._group, patience_s=_MIGRATION_TIMEOUT_S
            )
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
        deadline_s = time.monotonic() + timeout_s + _WORKER_STOP_TIMEOUT_S
        for worker in self._workers:
            worker.request_drain()
        return sum(w.wait_drained(max(0.0, deadline_s - time.monotonic())) for w in self._workers)

    def stop(self) -> None:
        """End all workers at once; may be repeated."""
        self._draining = True
        for worker in self._workers:
            worker.request_stop()
        for worker in self._workers:
            worker.stop()
            folder = self._home.worker_paths(worker.index).runtime_dir
            if folder:
                # Slabs that are needed stay, and so does their folder.
                with contextlib.suppress(OSError):
                    folder.rmdir()
        self._let_go()

    def samples(self) -> list[MetricSample]:
        """Return the numbers of all workers, as one agent's."""
        answers = self._crew.collect_metrics()
        restarts = sum(worker.restarts for worker in self._workers)
        with self._summing:
            found = self._sums.add_up(answers)
        return [*found, MetricSample("rankdump_agent_worker_restarts_total", restarts)]

    def reload(self, settings: DaemonSettings) -> None:
        """Give each worker its part of new settings."""
        self._every, self._settings = settings, settings.agent
        for worker in self._workers:
            worker.send_settings(self._settings_of(worker.index))

    def fault(self) -> str:
        """Say which worker nobody would start again; what ails a worker is for itself to end."""
        return "; ".join(filter(None, (worker.fault() for worker in self._workers)))

    def brief(self) -> str:
        """Say how many workers serve."""
        return f"{self._crew.serving_count} of {len(self._workers)} workers serve"

    def _worker(self, index: int, environ: Mapping[str, str]) -> WorkerProcess:
        inherited = strip_settings(environ)
        inherited.pop(_NOTIFY_VARIABLE, None)
        return WorkerProcess(
            index,
            folder=self._home.worker_paths(index).state_dir,
            environ=inherited | self._settings_of(index),
        )

    def _settings_of(self, index: int) -> dict[str, str]:
        home = self._home.worker_paths(index)
        share = build_worker_settings(
            self._settings,
            index,
            state_dir=str(home.state_dir),
            runtime_dir=str(home.runtime_dir or ""),
            memory_bytes=self._memory_bytes,
            cores=machine.count_cores(),
        )
        return build_environment(dataclasses.replace(self._every, agent=share))

    def _own_runtime(self, folder: Path) -> int:
        try:
            return lock_runtime_folder(folder, self._group)
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
            folder = self._home.worker_paths(worker.index).runtime_dir
            try:
                if folder:
                    make_group_folder(folder, self._group)
            except OSError as error:
                # The worker will find it out as well, and do without shared memory.
                _logger.warning("%s cannot be made: %s", folder, error)

    def _redirect(self, request: SessionRequest) -> str:
        if self._draining:
            raise UnavailableError("the agent is stopping and takes no new sessions")
        index = select_worker(request.job_id, request.rank, len(self._workers))
        return build_redirect(self._crew.get_address(index))


def find_state_paths(settings: AgentSettings) -> StatePaths:
    """Return where an agent of these settings keeps its own state and slabs."""
    socket = parse_socket_path(settings.listen)
    runtime_dir = Path(settings.runtime_dir) if settings.runtime_dir else socket and socket.parent
    return StatePaths(Path(settings.state_dir), runtime_dir if socket else None)


def reclaim_worker_sessions(settings: AgentSettings) -> None:
    """Take over what workers left, for an agent that has none now."""
    home = find_state_paths(settings)
    if home.list_worker_paths():
        guard = lock_ledger_folder(home.state_dir)
        try:
            group = find_group_id(settings.runtime_group)
            migrate_sessions(home, 1, group=group, patience_s=_MIGRATION_TIMEOUT_S)
        finally:
            os.close(guard)
