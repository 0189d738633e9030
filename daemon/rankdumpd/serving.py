"""The processes, put together: rooms, the door before them, and the life around them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from rankdump.contract import roots
from rankdump.contract.daemon_folder import DaemonFolder
from rankdump.contract.errors import ConfigError, RefusedError
from rankdump.wire.channel import Credentials
from rankdumpd import activation, lifecycle, machine
from rankdumpd.agent.retain import nobody as nothing_told
from rankdumpd.agent.service import Agent
from rankdumpd.agent.slabs.place import group_of
from rankdumpd.audit import Audit
from rankdumpd.coordinator.service import Coordinator
from rankdumpd.endpoint import measured
from rankdumpd.front.service import Front, bring_home_alone
from rankdumpd.gate import Gate
from rankdumpd.ingest.service import IngestRoom
from rankdumpd.ingest.source import check_apart
from rankdumpd.ingest.values import Task
from rankdumpd.leash import Leash
from rankdumpd.lifecycle import Reread
from rankdumpd.meters import Meters
from rankdumpd.required_files import RequiredFiles
from rankdumpd.server import Server, Service, socket_path
from rankdumpd.settings import AgentSettings, Settings
from rankdumpd.tls import Certificates, Revoked, nobody


def _audited(settings: Settings) -> AbstractContextManager[Audit | None]:
    """Return the one file in which a process writes down what was done, until it ends."""
    if not settings.log.audit:
        return contextlib.nullcontext()
    return contextlib.closing(Audit(Path(settings.log.audit)))


def _agent(
    settings: Settings, meters: Meters, audit: Audit | None, required: RequiredFiles
) -> Agent | Front:
    machine.give_way(settings.agent.nice)
    if settings.agent.workers > 1:
        return Front(settings, os.environ, meters=meters, required=required)
    bring_home_alone(settings.agent)
    tls = settings.tls
    own = Credentials(tls.ca, tls.certificate, tls.key)
    told = audit.add if audit else nothing_told
    return Agent(settings.agent, own, told=told, meters=meters, required=required)


def _door(
    settings: Settings,
    address: str,
    services: Sequence[Service],
    meters: Meters,
    audit: Audit | None,
    required: RequiredFiles,
    *,
    below_front: bool = False,
) -> Server:
    """Return the server of a process, with what protects it."""
    tls = settings.tls
    shown = revoked = gate = None
    if tls.on and not socket_path(address):
        told = audit.reloaded if audit else nobody
        shown = Certificates(tls, told)
        revoked = Revoked(Path(tls.revoked), told) if tls.revoked else None
    if shown or audit:
        gate = Gate(
            certificates=shown, revoked=revoked, audit=audit, own_may=below_front, meters=meters
        )
    group = group_of(settings.agent.runtime_group)
    return Server(address, services, tls=shown, gate=gate, group=group, required=required)


def ingest_task(settings: AgentSettings, source: Path, tree: Path) -> Task:
    """Return what taking over a folder of dumps is, by the settings of an agent."""
    threads = settings.encode_threads or machine.cores()
    return Task(source, tree, threads=threads, queue_bytes=settings.queue_bytes)


def _ingest(settings: AgentSettings) -> tuple[IngestRoom, ...]:
    """Return the room that follows the configured folder; none where none is."""
    if not settings.ingest_dir:
        return ()
    source, tree = Path(settings.ingest_dir), Path(settings.ingest_into)
    check_apart(source, tree)
    try:
        roots.check(str(tree), roots.folders(settings.roots), resolve=os.path.realpath)
    except RefusedError as error:
        raise ConfigError("settings", "agent.ingest_into", str(tree), str(error)) from None
    task = dataclasses.replace(ingest_task(settings, source, tree), delete=settings.ingest_delete)
    return (IngestRoom(task),)


def serve_agent(settings: Settings, reread: Reread, leash: Leash | None) -> int:
    """Be an agent until a signal; return the exit status. With a leash it is a worker."""
    # A folder is followed once on a host, by whoever is above the workers.
    ingest = () if leash else _ingest(settings.agent)
    listener = activation.inherited(os.environ)

    def moved(settings: Settings) -> Settings:
        """Return them with the socket beside the one that others hold open."""
        if listener is None:
            return settings
        agent = dataclasses.replace(settings.agent, listen=activation.direct_address(listener))
        return dataclasses.replace(settings, agent=agent)

    settings = moved(settings)
    meters, required = Meters(), RequiredFiles()
    with _audited(settings) as audit:
        agent = _agent(settings, meters, audit, required)
        metrics, page = measured(settings, meters, agent, audit=audit)
        services = (agent, metrics)
        listen = settings.agent.listen
        server = _door(settings, listen, services, meters, audit, required, below_front=bool(leash))
        if listener:
            required.keep(Path(listener.getsockname()), "no rank finds this agent any more")
        door = activation.Relay(listener, server) if listener else server
        rooms = (agent, *ingest, *page)
        return lifecycle.run(
            rooms,
            door,
            settings=settings,
            reread=lambda environ: moved(reread(environ)),
            leash=leash,
            required=required,
        )


def serve_coordinator(settings: Settings, reread: Reread) -> int:
    """Be a coordinator until a signal; return the exit status."""
    meters, required = Meters(), RequiredFiles()
    with _audited(settings) as audit:
        coordinator = Coordinator(settings.coordinator, meters=meters, required=required)
        metrics, page = measured(settings, meters, coordinator, audit=audit)
        services = (coordinator, metrics)
        server = _door(settings, settings.coordinator.listen, services, meters, audit, required)
        rooms = (coordinator, *page)
        return lifecycle.run(rooms, server, settings=settings, reread=reread, required=required)


def serve_both(settings: Settings, reread: Reread) -> int:
    """Be both on one address until a signal; return the exit status."""
    meters, required = Meters(), RequiredFiles()
    with _audited(settings) as audit:
        agent = _agent(settings, meters, audit, required)
        coordinator = Coordinator(settings.coordinator, meters=meters, required=required)
        return _serve_host(settings, reread, meters, audit, (agent, coordinator), required)


def serve_embedded(
    settings: Settings, reread: Reread, folder: DaemonFolder, *, merges: bool
) -> int:
    """Serve one job in a folder of its own until standard input has ended and no rank is connected.

    The folder is removed then, unless somebody uses it again. Without `merges` it is an agent
    alone. Return the exit status.
    """
    meters, required = Meters(), RequiredFiles()
    with _audited(settings) as audit:
        agent = _agent(settings, meters, audit, required)
        coordinator = Coordinator(
            settings.coordinator, ends_with_job=True, meters=meters, required=required
        )
        parts = (agent, coordinator) if merges else (agent,)
        lifecycle.stop_at_end_of(sys.stdin.fileno(), still_used=lambda: _has_ranks(agent))
        status = _serve_host(settings, reread, meters, audit, parts, required)
    folder.clear_unused(keep_log=status != 0, by_daemon=True)
    return status


def _serve_host(
    settings: Settings,
    reread: Reread,
    meters: Meters,
    audit: Audit | None,
    parts: Sequence[Agent | Front | Coordinator],
    required: RequiredFiles,
) -> int:
    """Serve on the agent's address, with whatever of agent and coordinator there is."""
    metrics, page = measured(settings, meters, *parts, audit=audit)
    server = _door(settings, settings.agent.listen, (*parts, metrics), meters, audit, required)
    agent, *others = parts
    rooms = (agent, *_ingest(settings.agent), *others, *page)
    return lifecycle.run(rooms, server, settings=settings, reread=reread, required=required)


def _has_ranks(agent: Agent | Front) -> bool:
    """Return whether a rank is connected."""
    return any(
        sample.value
        for sample in agent.samples()
        if sample.name == "rankdump_agent_sessions" and sample.labels["state"] == "open"
    )
