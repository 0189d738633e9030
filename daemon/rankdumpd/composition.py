"""Composition of the daemon processes: components, the gRPC server in front of them and the
lifecycle around them. The only module that knows agent, coordinator, ingest and workers at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rankdump._core.certificate_files import RevokedCertificates, ignore_reload
from rankdump._core.daemon_endpoint import MAX_JOB_DRAIN_S, DaemonFolder
from rankdump._core.pandas_blocker import leave_pandas_out
from rankdump._wire.channel import TlsCredentials
from rankdumpd.agent.service import DumpAgent
from rankdumpd.agent.shm.slab_folder import find_group_id
from rankdumpd.coordinator.service.coordinator import JobCoordinator
from rankdumpd.ingest.dump_file import IngestTask
from rankdumpd.ingest.runner import IngestComponent
from rankdumpd.server import lifecycle, machine
from rankdumpd.server.audit_log import AuditLog, ignore_action
from rankdumpd.server.call_gate import CallGate
from rankdumpd.server.grpc_server import GrpcServer, GrpcService, parse_socket_path
from rankdumpd.server.lifecycle import SettingsReader
from rankdumpd.server.metrics import REFUSED_CALLS_METRIC, MetricCounters
from rankdumpd.server.metrics_page import MetricsEndpoint, ProcessMetrics
from rankdumpd.server.state_files import RequiredFiles
from rankdumpd.server.tls import ServerCertificates
from rankdumpd.server.worker_pipe import WorkerPipe
from rankdumpd.settings import AgentSettings, DaemonSettings
from rankdumpd.workers.supervisor import WorkerSupervisor, reclaim_worker_sessions

if TYPE_CHECKING:
    from rankdumpd.server.page_process import PageProcess

_PAGE_MODULES = ("starlette", "uvicorn", "jinja2", "pyarrow", "duckdb")
_logger = logging.getLogger(__name__)


def build_ingest_task(settings: AgentSettings, source: Path, tree: Path) -> IngestTask:
    """Return the task of ingesting a folder, with the threads and limits of an agent's settings."""
    threads = settings.encode_threads or machine.count_cores()
    return IngestTask(source, tree, threads=threads, queue_bytes=settings.queue_bytes)


def _build_ingest(settings: AgentSettings) -> tuple[IngestComponent, ...]:
    """Return the component that follows the configured folder; empty without such a folder."""
    if not settings.ingest_dir:
        return ()
    source, tree = Path(settings.ingest_dir), Path(settings.ingest_into)
    task = dataclasses.replace(
        build_ingest_task(settings, source, tree), delete=settings.ingest_delete
    )
    return (IngestComponent(task),)


class _DaemonProcess:
    """Builds the components of one process, with their counters and audit log, and serves them."""

    def __init__(self, settings: DaemonSettings, reread: SettingsReader) -> None:
        machine.raise_descriptor_limit()
        self._settings, self._reread = settings, reread
        self._counters, self._required = MetricCounters(), RequiredFiles()
        self._counters.start_at_zero(REFUSED_CALLS_METRIC)
        self._audit = AuditLog(Path(settings.log.audit)) if settings.log.audit else None

    def build_agent(self, *, ends_with_job: bool = False) -> DumpAgent | WorkerSupervisor:
        """Return the agent, or with several workers their supervisor."""
        settings, counters, required = self._settings, self._counters, self._required
        machine.lower_priority(settings.agent.nice)
        if settings.agent.workers > 1:
            return WorkerSupervisor(settings, os.environ, counters=counters, required=required)
        reclaim_worker_sessions(settings.agent)
        tls = settings.tls
        own = TlsCredentials(tls.ca, tls.certificate, tls.key)
        audit = self._audit.add if self._audit else ignore_action
        return DumpAgent(
            settings.agent,
            own,
            audit=audit,
            counters=counters,
            required=required,
            ends_with_job=ends_with_job,
        )

    def build_coordinator(self, *, ends_with_job: bool = False) -> JobCoordinator:
        """Return the coordinator of this process."""
        return JobCoordinator(
            self._settings.coordinator,
            ends_with_job=ends_with_job,
            counters=self._counters,
            required=self._required,
        )

    def serve(
        self,
        *parts: DumpAgent | WorkerSupervisor | JobCoordinator,
        section: Literal["agent", "coordinator"] = "agent",
        ingest: Sequence[IngestComponent] = (),
        pipe: WorkerPipe | None = None,
        begin_watch: Callable[[], None] = lambda: None,
        max_drain_s: float = 0.0,
    ) -> int:
        """Serve `parts` at the address of a settings section until a signal; return the exit
        status.

        The components of `ingest` are drained after the first part. `max_drain_s` is passed on to
        `DaemonRun`.
        """
        metrics = ProcessMetrics((self._counters.samples, *(part.samples for part in parts)))
        page = self.build_page(metrics, parts, explain_fault=lambda: server.explain_fault())
        server = self._build_server(section, (*parts, metrics), is_worker=bool(pipe))
        first, *others = parts
        lifecycle.relax_garbage_collector()
        leave_pandas_out()
        with contextlib.closing(self._audit) if self._audit else contextlib.nullcontext():
            daemon_run = lifecycle.DaemonRun(
                (first, *ingest, *others, *page),
                server,
                settings=self._settings,
                reread=self._reread,
                pipe=pipe,
                required=self._required,
                max_drain_s=max_drain_s,
            )
            return daemon_run.run(begin_watch)

    def build_page(
        self,
        metrics: ProcessMetrics,
        parts: Sequence[DumpAgent | WorkerSupervisor | JobCoordinator],
        *,
        explain_fault: Callable[[], str],
    ) -> tuple[MetricsEndpoint, ...]:
        """Return the HTTP server of metrics, health and pages, if settings ask for one."""
        settings = self._settings
        if not settings.metrics.listen:
            return ()
        endpoint = MetricsEndpoint(
            settings.metrics.listen,
            metrics,
            settings.tls,
            counters=self._counters,
            audit=self._audit,
            explain_fault=explain_fault,
            pages=self._build_pages(parts),
        )
        return (endpoint,)

    def _build_pages(
        self, parts: Sequence[DumpAgent | WorkerSupervisor | JobCoordinator]
    ) -> PageProcess | None:
        """Return the process of the pages that show a coordinator's trees and jobs; None without
        pages.
        """
        known = [part for part in parts if isinstance(part, JobCoordinator)]
        if not known or not self._settings.coordinator.pages:
            return None
        missing = find_missing_module()
        if missing:
            _logger.warning(
                "module %s is missing, so %s has no pages (pip install 'rankdump[web]', or the "
                "Debian package rankdump-web)",
                missing,
                self._settings.metrics.listen,
            )
            return None
        from rankdumpd.server.page_process import PageProcess

        return PageProcess(known[0].list_trees, known[0].build_status, self._audit)

    def _build_server(
        self,
        section: Literal["agent", "coordinator"],
        services: Sequence[GrpcService],
        *,
        is_worker: bool,
    ) -> GrpcServer:
        """Return the gRPC server of the process, with its certificates and its call gate."""
        own = self._settings.agent if section == "agent" else self._settings.coordinator
        address = own.listen
        tls, audit = self._settings.tls, self._audit
        certificates = revoked = gate = None
        if tls.on and not parse_socket_path(address):
            on_reload = audit.add_reload if audit else ignore_reload
            certificates = ServerCertificates(tls, on_reload)
            revoked = RevokedCertificates(Path(tls.revoked), on_reload) if tls.revoked else None
        if certificates or audit:
            gate = CallGate(
                certificates=certificates,
                revoked=revoked,
                audit=audit,
                own_may=is_worker,
                counters=self._counters,
            )
        group = find_group_id(self._settings.agent.runtime_group)
        return GrpcServer(
            address,
            services,
            setting=f"{section}.listen",
            tls=certificates,
            gate=gate,
            group=group,
            required=self._required,
        )


def serve_agent(settings: DaemonSettings, reread: SettingsReader, pipe: WorkerPipe | None) -> int:
    """Run an agent until a signal; return the exit status. With a `pipe` it runs as a worker."""
    process = _DaemonProcess(settings, reread)
    # Only one process of a host follows the folder: the supervisor, where there are workers.
    ingest = () if pipe else _build_ingest(settings.agent)
    agent = process.build_agent()
    return process.serve(agent, ingest=ingest, pipe=pipe)


def serve_coordinator(settings: DaemonSettings, reread: SettingsReader) -> int:
    """Run a coordinator until a signal; return the exit status."""
    process = _DaemonProcess(settings, reread)
    return process.serve(process.build_coordinator(), section="coordinator")


def serve_both(settings: DaemonSettings, reread: SettingsReader) -> int:
    """Run agent and coordinator on the agent's address until a signal; return the exit status."""
    process = _DaemonProcess(settings, reread)
    return process.serve(
        process.build_agent(),
        process.build_coordinator(),
        ingest=_build_ingest(settings.agent),
    )


def serve_embedded(
    settings: DaemonSettings, reread: SettingsReader, folder: DaemonFolder, *, merges: bool
) -> int:
    """Serve one job in its own folder until standard input has ended and no rank is connected.

    After that the folder is removed, unless another process uses it again. Without `merges` no
    coordinator runs. Return the exit status.
    """
    process = _DaemonProcess(settings, reread)
    agent = process.build_agent(ends_with_job=True)
    coordinator = [process.build_coordinator(ends_with_job=True)] if merges else []

    def begin_watch() -> None:
        lifecycle.stop_at_end_of_file(sys.stdin.fileno(), still_used=lambda: _has_ranks(agent))

    ingest = _build_ingest(settings.agent)
    parts = agent, *coordinator
    status = process.serve(
        *parts, ingest=ingest, begin_watch=begin_watch, max_drain_s=MAX_JOB_DRAIN_S
    )
    folder.remove_unused(keep_log=status != 0, by_daemon=True)
    return status


def find_missing_module() -> str:
    """Return the name of a module that pages need and that is not installed; empty if none is
    missing.
    """
    return next((name for name in _PAGE_MODULES if importlib.util.find_spec(name) is None), "")


def _has_ranks(agent: DumpAgent | WorkerSupervisor) -> bool:
    """Return whether a rank is connected to the agent."""
    return any(
        sample.value
        for sample in agent.samples()
        if sample.name == "rankdump_agent_sessions" and sample.labels["state"] == "open"
    )
