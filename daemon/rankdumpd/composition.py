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
from rankdumpd.agent.retention.manager import no_op as nothing_told
from rankdumpd.agent.service import DumpAgent
from rankdumpd.agent.shm.slab_folder import find_group_id
from rankdumpd.coordinator.service.coordinator import JobCoordinator
from rankdumpd.ingest.dump_file import IngestTask
from rankdumpd.ingest.folder import check_separate_folders
from rankdumpd.ingest.runner import IngestComponent
from rankdumpd.server import grpc_server, lifecycle, machine
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
    """Return the one file in which a process writes down what was done, until it ends."""
    if not settings.log.audit:
        return contextlib.nullcontext()
    return contextlib.closing(AuditLog(Path(settings.log.audit)))


def _build_agent(
    settings: DaemonSettings,
    meters: MetricCounters,
    audit: AuditLog | None,
    required: RequiredFiles,
) -> DumpAgent | WorkerSupervisor:
    machine.lower_priority(settings.agent.nice)
    if settings.agent.workers > 1:
        return WorkerSupervisor(settings, os.environ, meters=meters, required=required)
    reclaim_worker_sessions(settings.agent)
    tls = settings.tls
    own = TlsCredentials(tls.ca, tls.certificate, tls.key)
    told = audit.add if audit else nothing_told
    return DumpAgent(settings.agent, own, audit=told, meters=meters, required=required)


def _build_server(
    settings: DaemonSettings,
    address: str,
    services: Sequence[GrpcService],
    meters: MetricCounters,
    audit: AuditLog | None,
    required: RequiredFiles,
    *,
    below_front: bool = False,
) -> GrpcServer:
    """Return the server of a process, with what protects it."""
    tls = settings.tls
    shown = revoked = gate = None
    if tls.on and not parse_socket_path(address):
        told = audit.add_reload if audit else ignore_reload
        shown = ServerCertificates(tls, told)
        revoked = RevokedCertificates(Path(tls.revoked), told) if tls.revoked else None
    if shown or audit:
        gate = CallGate(
            certificates=shown, revoked=revoked, audit=audit, own_may=below_front, meters=meters
        )
    group = find_group_id(settings.agent.runtime_group)
    return GrpcServer(address, services, tls=shown, gate=gate, group=group, required=required)


def build_ingest_task(settings: AgentSettings, source: Path, tree: Path) -> IngestTask:
    """Return what taking over a folder of dumps is, by the settings of an agent."""
    threads = settings.encode_threads or machine.count_cores()
    return IngestTask(source, tree, threads=threads, queue_bytes=settings.queue_bytes)


def _build_ingest(settings: AgentSettings) -> tuple[IngestComponent, ...]:
    """Return the room that follows the configured folder; none where none is."""
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


def serve_agent(settings: DaemonSettings, reread: SettingsReader, leash: WorkerPipe | None) -> int:
    """Be an agent until a signal; return the exit status. With a leash it is a worker."""
    # A folder is followed once on a host, by whoever is above the workers.
    ingest = () if leash else _build_ingest(settings.agent)
    listener = grpc_server.inherit_socket(os.environ)

    def moved(settings: DaemonSettings) -> DaemonSettings:
        """Return them with the socket beside the one that others hold open."""
        if listener is None:
            return settings
        agent = dataclasses.replace(
            settings.agent, listen=grpc_server.format_direct_address(listener)
        )
        return dataclasses.replace(settings, agent=agent)

    settings = moved(settings)
    meters, required = MetricCounters(), RequiredFiles()
    with _open_audit_log(settings) as audit:
        agent = _build_agent(settings, meters, audit, required)
        metrics, page = build_metrics(settings, meters, agent, audit=audit)
        services = (agent, metrics)
        listen = settings.agent.listen
        server = _build_server(
            settings, listen, services, meters, audit, required, below_front=bool(leash)
        )
        if listener:
            required.watch_file(Path(listener.getsockname()), "no rank finds this agent any more")
        door = grpc_server.SocketRelay(listener, server) if listener else server
        rooms = (agent, *ingest, *page)
        return lifecycle.run_process(
            rooms,
            door,
            settings=settings,
            reread=lambda environ: moved(reread(environ)),
            leash=leash,
            required=required,
        )


def serve_coordinator(settings: DaemonSettings, reread: SettingsReader) -> int:
    """Be a coordinator until a signal; return the exit status."""
    meters, required = MetricCounters(), RequiredFiles()
    with _open_audit_log(settings) as audit:
        coordinator = JobCoordinator(settings.coordinator, meters=meters, required=required)
        metrics, page = build_metrics(settings, meters, coordinator, audit=audit)
        services = (coordinator, metrics)
        server = _build_server(
            settings, settings.coordinator.listen, services, meters, audit, required
        )
        rooms = (coordinator, *page)
        return lifecycle.run_process(
            rooms, server, settings=settings, reread=reread, required=required
        )


def serve_both(settings: DaemonSettings, reread: SettingsReader) -> int:
    """Be both on one address until a signal; return the exit status."""
    meters, required = MetricCounters(), RequiredFiles()
    with _open_audit_log(settings) as audit:
        agent = _build_agent(settings, meters, audit, required)
        coordinator = JobCoordinator(settings.coordinator, meters=meters, required=required)
        return _serve_host(settings, reread, meters, audit, (agent, coordinator), required)


def serve_embedded(
    settings: DaemonSettings, reread: SettingsReader, folder: DaemonFolder, *, merges: bool
) -> int:
    """Serve one job in a folder of its own until standard input has ended and no rank is connected.

    The folder is removed then, unless somebody uses it again. Without `merges` it is an agent
    alone. Return the exit status.
    """
    meters, required = MetricCounters(), RequiredFiles()
    with _open_audit_log(settings) as audit:
        agent = _build_agent(settings, meters, audit, required)
        coordinator = JobCoordinator(
            settings.coordinator, ends_with_job=True, meters=meters, required=required
        )
        parts = (agent, coordinator) if merges else (agent,)
        lifecycle.stop_at_end_of_file(sys.stdin.fileno(), still_used=lambda: _has_ranks(agent))
        status = _serve_host(settings, reread, meters, audit, parts, required)
    folder.remove_unused(keep_log=status != 0, by_daemon=True)
    return status


def _serve_host(
    settings: DaemonSettings,
    reread: SettingsReader,
    meters: MetricCounters,
    audit: AuditLog | None,
    parts: Sequence[DumpAgent | WorkerSupervisor | JobCoordinator],
    required: RequiredFiles,
) -> int:
    """Serve on the agent's address, with whatever of agent and coordinator there is."""
    metrics, page = build_metrics(settings, meters, *parts, audit=audit)
    server = _build_server(
        settings, settings.agent.listen, (*parts, metrics), meters, audit, required
    )
    agent, *others = parts
    rooms = (agent, *_build_ingest(settings.agent), *others, *page)
    return lifecycle.run_process(rooms, server, settings=settings, reread=reread, required=required)


def _has_ranks(agent: DumpAgent | WorkerSupervisor) -> bool:
    """Return whether a rank is connected."""
    return any(
        sample.value
        for sample in agent.samples()
        if sample.name == "rankdump_agent_sessions" and sample.labels["state"] == "open"
    )
