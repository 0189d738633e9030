"""Supervisor of the workers of one agent: divides the limits among them, starts and stops them,
redirects ranks to them and merges their status. It receives no frames itself.
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
from rankdump.errors import ProtocolError, RejectedError, UnavailableError
from rankdump.wire.v1 import agent_pb2, agent_pb2_grpc
from rankdumpd.agent.ingress.servicer import SERVICE_NAME, limit_drain_s
from rankdumpd.agent.ledger.database import lock_ledger_folder
from rankdumpd.agent.shm.slab_folder import find_group_id, share_memory
from rankdumpd.server import machine
from rankdumpd.server.grpc_server import abort_on_error, parse_socket_path
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
    """Return the settings of one worker: its own folders, and its share of limits, memory and
    cores.
    """
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
        # Rounded up, so that `max_sessions` evenly distributed ranks are admitted.
        max_sessions=-(-settings.max_sessions // workers),
        disk_bytes=_divide_limit(settings.disk_bytes, workers),
        job_bytes=_divide_limit(settings.job_bytes, workers),
        retain_bytes=_divide_limit(settings.retain_bytes, workers),
    )


def _divide_limit(limit_bytes: int, workers: int) -> int:
    """Return a worker's share of a limit, at least 1; 0 where there is no limit."""
    return max(1, limit_bytes // workers) if limit_bytes else 0


def build_worker_address(listen: str, index: int) -> str:
    """Return the address of a worker: a socket beside the public socket, or any free TCP port."""
    if listen.startswith("unix:"):
        return f"{listen}.{index}"
    return f"{listen.rpartition(':')[0]}:0"


def build_redirect(address: str) -> str:
    """Return the part of a worker's address that differs from the public address."""
    return address.rpartition("/" if address.startswith("unix:") else ":")[2]


class SupervisorServicer(agent_pb2_grpc.AgentServiceServicer):
    """The agent's gRPC service in the supervisor, which receives no frames."""

    def __init__(
        self,
        clients: WorkerClients,
        *,
        redirect: Callable[[SessionRequest], str],
        counters: MetricCounters,
    ) -> None:
        self._clients, self._redirect, self._counters = clients, redirect, counters

    def OpenSession(  # noqa: N802 - the name is the generated base class's
        self, request: agent_pb2.OpenSessionRequest, context: grpc.ServicerContext
    ) -> agent_pb2.OpenSessionResponse:
        """Redirect a rank to its worker."""
        with abort_on_error(context, self._counters):
            redirect = self._redirect(session_messages.session_request_from_wire(request))
            grant = SessionGrant(b"", 0, 0, redirect=redirect)
            return session_messages.session_grant_to_wire(grant)

    def Push(  # noqa: N802 - the name is the generated base class's
        self, request_iterator: Iterator[agent_pb2.PushRequest], context: grpc.ServicerContext
    ) -> Iterator[agent_pb2.PushResponse]:
        """Refuse a rank that did not follow its redirect."""
        with abort_on_error(context, self._counters):
            raise RejectedError(
                "this agent has several workers, and this client follows no redirect: it is older "
                "than the agent"
            )
        return iter(())

    def AnswerOrder(  # noqa: N802 - the name is the generated base class's
        self, request: agent_pb2.AnswerOrderRequest, context: grpc.ServicerContext
    ) -> agent_pb2.AnswerOrderResponse:
        """Refuse a rank that sends an answer to the supervisor in place of its worker."""
        with abort_on_error(context, self._counters):
            raise RejectedError("a rank answers the worker that has its session")
        return agent_pb2.AnswerOrderResponse()

    def Status(  # noqa: N802 - the name is the generated base class's
        self, request: agent_pb2.AgentStatusRequest, context: grpc.ServicerContext
    ) -> agent_pb2.AgentStatusResponse:
        """Return the merged status of all workers."""
        return agent_pb2.AgentStatusResponse(
            view=status_messages.view_to_wire(self._clients.collect_view())
        )

    def Control(  # noqa: N802 - the name is the generated base class's
        self, request: agent_pb2.ControlRequest, context: grpc.ServicerContext
    ) -> agent_pb2.ControlResponse:
        """Forward a drain, a pin or a freeze to all workers."""
        with abort_on_error(context, self._counters):
            if request.HasField("pin"):
                self._clients.pin_job(request.pin)
                return agent_pb2.ControlResponse()
            if request.HasField("freeze"):
                return self._clients.freeze_job(request.freeze)
            if not request.HasField("drain"):
                raise ProtocolError("the control request has no action")
            left = self._clients.drain_workers(limit_drain_s(request.drain))
            return agent_pb2.ControlResponse(drained=left == 0, queued_records=left)


_logger = logging.getLogger(__name__)

_MIGRATION_TIMEOUT_S = 10.0
_NOTIFY_VARIABLE = "NOTIFY_SOCKET"
# A worker drains as long as the supervisor. After that it has this time, in seconds, to end its
# calls and close its files.
_WORKER_STOP_TIMEOUT_S = 8.0


class WorkerSupervisor(Component):
    """An agent with several workers; it owns the state folder from its creation until `stop`."""

    # The stop time of a worker, and the same again for a worker that hangs.
    max_stop_s = 2 * Component.max_stop_s
    service_names: tuple[str, ...] = (SERVICE_NAME,)

    def __init__(
        self,
        settings: DaemonSettings,
        environ: Mapping[str, str],
        *,
        counters: MetricCounters | None = None,
        required: RequiredFiles | None = None,
    ) -> None:
        """Run the workers with `environ` and their share of the settings; `required` contains the
        files that this process needs.
        """
        self._all_settings = settings
        self._settings = agent = settings.agent
        # Checked here, because the socket path of the last worker is the longest one.
        parse_socket_path(build_worker_address(agent.listen, agent.workers - 1))
        self._group = find_group_id(agent.runtime_group)
        self._paths = find_state_paths(agent)
        self._locks = [lock_ledger_folder(self._paths.state_dir)]
        if self._paths.runtime_dir and agent.slab_bytes:
            self._locks.append(self._lock_runtime_folder(self._paths.runtime_dir))
        self._memory_bytes = share_memory(
            agent.memory_bytes,
            machine_bytes=machine.read_memory_bytes(),
            queue_bytes=agent.queue_bytes,
            max_record_bytes=agent.max_record_bytes,
        ).total_bytes
        self._workers = [self._make_worker(index, environ) for index in range(agent.workers)]
        tls = settings.tls
        certificates = (
            ServerCertificates(tls) if tls.on and self._paths.runtime_dir is None else None
        )
        self._clients = WorkerClients(
            self._workers,
            TlsCredentials(tls.ca, tls.certificate, tls.key),
            own_host=lambda: certificates.read_material().hosts[0] if certificates else "",
            required=required or RequiredFiles(),
        )
        self._draining = False
        self._counters = counters or MetricCounters()
        self._sums, self._summing = WorkerMetricSums(), threading.Lock()

    def register(self, server: grpc.Server) -> None:
        """Add the agent's service to a server."""
        servicer = SupervisorServicer(
            self._clients, redirect=self._redirect, counters=self._counters
        )
        agent_pb2_grpc.add_AgentServiceServicer_to_server(servicer, server)

    def start(self) -> None:
        """Move all sessions to their workers, start the workers and wait until they serve."""
        try:
            self._make_runtime_folders()
            migrate_sessions(
                self._paths, len(self._workers), group=self._group, patience_s=_MIGRATION_TIMEOUT_S
            )
            for worker in self._workers:
                worker.start()
            for worker in self._workers:
                worker.wait_ready()
        except BaseException:
            self.stop()
            raise

    def drain(self, timeout_s: float) -> int:
        """Drain all workers at the same time; return the number of items left."""
        self._draining = True
        deadline_s = time.monotonic() + timeout_s + _WORKER_STOP_TIMEOUT_S
        for worker in self._workers:
            worker.request_drain()
        return sum(w.wait_drained(max(0.0, deadline_s - time.monotonic())) for w in self._workers)

    def explain_unfinished(self) -> str:
        """Return for the log what happens to the items that `drain` left unfinished."""
        return "the lines of the workers say what becomes of them"

    def stop(self) -> None:
        """Stop all workers at once; may be repeated."""
        self._draining = True
        for worker in self._workers:
            worker.request_stop()
        for worker in self._workers:
            worker.stop()
            folder = self._paths.worker_paths(worker.index).runtime_dir
            if folder:
                # The folder is not removed if it contains slabs that are in use.
                with contextlib.suppress(OSError):
                    folder.rmdir()
        self._release_locks()

    def samples(self) -> list[MetricSample]:
        """Return the metrics of all workers, summed up as those of one agent."""
        answers = self._clients.collect_metrics()
        restarts = sum(worker.restarts for worker in self._workers)
        with self._summing:
            samples = self._sums.add_up(answers)
        return [*samples, MetricSample("rankdump_agent_worker_restarts_total", restarts)]

    def reload(self, settings: DaemonSettings) -> None:
        """Send each worker its share of the new settings."""
        self._all_settings, self._settings = settings, settings.agent
        for worker in self._workers:
            worker.send_settings(self._build_environment(worker.index))

    def fault(self) -> str:
        """Return which worker would not be restarted; empty if none. A worker with a fault exits by
        itself.
        """
        return "; ".join(filter(None, (worker.fault() for worker in self._workers)))

    def summarize(self) -> str:
        """Return the number of workers that serve."""
        return f"{self._clients.serving_count} of {len(self._workers)} workers serve"

    def _make_worker(self, index: int, environ: Mapping[str, str]) -> WorkerProcess:
        inherited = strip_settings(environ)
        inherited.pop(_NOTIFY_VARIABLE, None)
        return WorkerProcess(
            index,
            folder=self._paths.worker_paths(index).state_dir,
            environ=inherited | self._build_environment(index),
        )

    def _build_environment(self, index: int) -> dict[str, str]:
        paths = self._paths.worker_paths(index)
        share = build_worker_settings(
            self._settings,
            index,
            state_dir=str(paths.state_dir),
            runtime_dir=str(paths.runtime_dir or ""),
            memory_bytes=self._memory_bytes,
            cores=machine.count_cores(),
        )
        return build_environment(dataclasses.replace(self._all_settings, agent=share))

    def _lock_runtime_folder(self, folder: Path) -> int:
        try:
            return lock_runtime_folder(folder, self._group)
        except UnavailableError:
            self._release_locks()
            raise

    def _release_locks(self) -> None:
        while self._locks:
            lock = self._locks.pop()
            if lock >= 0:
                os.close(lock)

    def _make_runtime_folders(self) -> None:
        for worker in self._workers:
            folder = self._paths.worker_paths(worker.index).runtime_dir
            try:
                if folder:
                    make_group_folder(folder, self._group)
            except OSError as error:
                # The worker will fail to create the folder, too, and will work without shared
                # memory.
                _logger.warning(
                    "the folder %s for shared memory cannot be created: %s", folder, error
                )

    def _redirect(self, request: SessionRequest) -> str:
        if self._draining:
            raise UnavailableError("the agent is stopping and takes no new sessions")
        index = select_worker(request.job_id, request.rank, len(self._workers))
        return build_redirect(self._clients.get_address(index))


def find_state_paths(settings: AgentSettings) -> StatePaths:
    """Return the state and runtime folders of an agent with these settings."""
    socket = parse_socket_path(settings.listen)
    runtime_dir = Path(settings.runtime_dir) if settings.runtime_dir else socket and socket.parent
    return StatePaths(Path(settings.state_dir), runtime_dir if socket else None)


def reclaim_worker_sessions(settings: AgentSettings) -> None:
    """Move the sessions of former workers back to an agent that has no workers now."""
    paths = find_state_paths(settings)
    if paths.list_worker_paths():
        lock = lock_ledger_folder(paths.state_dir)
        try:
            group = find_group_id(settings.runtime_group)
            migrate_sessions(paths, 1, group=group, patience_s=_MIGRATION_TIMEOUT_S)
        finally:
            os.close(lock)
