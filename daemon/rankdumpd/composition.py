"""Composition of the daemon processes: components, the gRPC server in front of them and the
lifecycle around them. The only module that knows agent, coordinator, ingest and workers at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from rankdump._core import tree_root
from rankdump._core.daemon_endpoint import DaemonFolder
from rankdump._wire.channel import TlsCredentials
from rankdump.errors import ConfigError, RejectedError
from rankdumpd.agent.retention.manager import no_op
from rankdumpd.agent.service import DumpAgent
from rankdumpd.agent.shm.slab_folder import find_group_id
from rankdumpd.coordinator.service.coordinator import JobCoordinator
from rankdumpd.ingest.dump_file import IngestTask
from rankdumpd.ingest.folder import check_separate_folders
from rankdumpd.ingest.runner import IngestComponent
from rankdumpd.server import lifecycle, machine
from rankdumpd.server.audit_log import AuditLog
from rankdumpd.server.call_gate import CallGate
from rankdumpd.server.grpc_server import GrpcServer, GrpcService, parse_socket_path
from rankdumpd.server.lifecycle import SettingsReader
from rankdumpd.server.metrics import MetricCounters
from rankdumpd.server.metrics_page import build_metrics
from rankdumpd.server.state_files import RequiredFiles
from rankdumpd.server.tls import RevokedCertificates, ServerCertificates, ignore_reload
from rankdumpd.server.worker_pipe import WorkerPipe
from rankdumpd.settings import AgentSettings, DaemonSettings
from rankdumpd.workers.supervisor import WorkerSupervisor, reclaim_worker_sessions


def _open_audit_log(settings: DaemonSettings) -> AbstractContextManager[AuditLog | None]:
    """Return the audit log of this process, open until the end of the context; None without one."""
    if not settings.log.audit:
        return contextlib.nullcontext()
    return contextlib.closing(AuditLog(Path(settings.log.audit)))


def _build_agent(
    settings: DaemonSettings,
    counters: MetricCounters,
    audit: AuditLog | None,
    required: RequiredFiles,
) -> DumpAgent | WorkerSupervisor:
    machine.lower_priority(settings.agent.nice)
    if settings.agent.workers > 1:
        return WorkerSupervisor(settings, os.environ, counters=counters, required=required)
    reclaim_worker_sessions(settings.agent)
    tls = settings.tls
    own = TlsCredentials(tls.ca, tls.certificate, tls.key)
    return DumpAgent(
        settings.agent, own, audit=audit.add if audit else no_op, meters=counters, required=required
    )


def _build_server(
    settings: DaemonSettings,
    address: str,
    services: Sequence[GrpcService],
    counters: MetricCounters,
    audit: AuditLog | None,
    required: RequiredFiles,
    *,
    is_worker: bool = False,
) -> GrpcServer:
    """Return the gRPC server of a process, with its certificates and its call gate."""
    tls = settings.tls
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
            counters=counters,
        )
    group = find_group_id(settings.agent.runtime_group)
    return GrpcServer(
        address, services, tls=certificates, gate=gate, group=group, required=required
    )


def build_ingest_task(settings: AgentSettings, source: Path, tree: Path) -> IngestTask:
    """Return the task of ingesting a folder, with the threads and limits of an agent's settings."""
    threads = settings.encode_threads or machine.count_cores()
    return IngestTask(source, tree, threads=threads, queue_bytes=settings.queue_bytes)


def _build_ingest(settings: AgentSettings) -> tuple[IngestComponent, ...]:
    """Return the component that follows the configured folder; empty without such a folder."""
    if not settings.ingest_dir:
        return ()
    source, tree = Path(settings.ingest_dir), Path(settings.ingest_into)
    check_separate_folders(source, tree)
    try:
        tree_root.check_root(
            str(tree), tree_root.split_roots(settings.roots), resolve=os.path.realpath
        )
    except RejectedError as error:
        raise ConfigError("settings", "agent.ingest_into", str(tree), str(error)) from None
    task = dataclasses.replace(
        build_ingest_task(settings, source, tree), delete=settings.ingest_delete
    )
    return (IngestComponent(task),)


def serve_agent(settings: DaemonSettings, reread: SettingsReader, pipe: WorkerPipe | None) -> int:
    """Run an agent until a signal; return the exit status. With a `pipe` it is a worker."""
    # One process of a host follows the folder: the supervisor, where there are workers.
    ingest = () if pipe else _build_ingest(settings.agent)
    counters, required = MetricCounters(), RequiredFiles()
    with _open_audit_log(settings) as audit:
        agent = _build_agent(settings, counters, audit, required)
        metrics, page = build_metrics(settings, counters, agent, audit=audit)
        services = (agent, metrics)
        listen = settings.agent.listen
        server = _build_server(
            settings, listen, services, counters, audit, required, is_worker=bool(pipe)
        )
        components = (agent, *ingest, *page)
        return lifecycle.run_process(
            components,
            server,
            settings=settings,
            reread=reread,
            pipe=pipe,
            required=required,
        )


def serve_coordinator(settings: DaemonSettings, reread: SettingsReader) -> int:
    """Run a coordinator until a signal; return the exit status."""
    counters, required = MetricCounters(), RequiredFiles()
    with _open_audit_log(settings) as audit:
        coordinator = JobCoordinator(settings.coordinator, counters=counters, required=required)
        metrics, page = build_metrics(settings, counters, coordinator, audit=audit)
        services = (coordinator, metrics)
        server = _build_server(
            settings, settings.coordinator.listen, services, counters, audit, required
        )
        components = (coordinator, *page)
        return lifecycle.run_process(
            components, server, settings=settings, reread=reread, required=required
        )


def serve_both(settings: DaemonSettings, reread: SettingsReader) -> int:
    """Run agent and coordinator on one address until a signal; return the exit status."""
    counters, required = MetricCounters(), RequiredFiles()
    with _open_audit_log(settings) as audit:
        agent = _build_agent(settings, counters, audit, required)
        coordinator = JobCoordinator(settings.coordinator, counters=counters, required=required)
        return _serve_host(settings, reread, counters, audit, (agent, coordinator), required)


def serve_embedded(
    settings: DaemonSettings, reread: SettingsReader, folder: DaemonFolder, *, merges: bool
) -> int:
    """Serve one job in its own folder until standard input has ended and no rank is connected.

    The folder is removed then, unless another process uses it again. Without `merges` there is no
    coordinator. Return the exit status.
    """
    counters, required = MetricCounters(), RequiredFiles()
    with _open_audit_log(settings) as audit:
        agent = _build_agent(settings, counters, audit, required)
        coordinator = JobCoordinator(
            settings.coordinator, ends_with_job=True, counters=counters, required=required
        )
        parts = (agent, coordinator) if merges else (agent,)
        lifecycle.stop_at_end_of_file(sys.stdin.fileno(), still_used=lambda: _has_ranks(agent))
        status = _serve_host(settings, reread, counters, audit, parts, required)
    folder.remove_unused(keep_log=status != 0, by_daemon=True)
    return status


def _serve_host(
    settings: DaemonSettings,
    reread: SettingsReader,
    counters: MetricCounters,
    audit: AuditLog | None,
    parts: Sequence[DumpAgent | WorkerSupervisor | JobCoordinator],
    required: RequiredFiles,
) -> int:
    """Serve an agent, and a coordinator if `parts` has one, on the agent's address."""
    metrics, page = build_metrics(settings, counters, *parts, audit=audit)
    server = _build_server(
        settings, settings.agent.listen, (*parts, metrics), counters, audit, required
    )
    agent, *others = parts
    components = (agent, *_build_ingest(settings.agent), *others, *page)
    return lifecycle.run_process(
        components, server, settings=settings, reread=reread, required=required
    )


def _has_ranks(agent: DumpAgent | WorkerSupervisor) -> bool:
    """Return whether a rank is connected."""
    return any(
        sample.value
        for sample in agent.samples()
        if sample.name == "rankdump_agent_sessions" and sample.labels["state"] == "open"
    )
