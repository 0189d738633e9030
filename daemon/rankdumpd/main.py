"""The command `rankdumpd`: reads settings, composes a process, runs it."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from rankdump.codec import CODECS
from rankdump.contract.errors import ConfigError, RankdumpError
from rankdump.wire.channel import Credentials
from rankdumpd import lifecycle, logs, machine
from rankdumpd.agent.service import Agent
from rankdumpd.agent.slabs.place import group_of
from rankdumpd.audit import Audit
from rankdumpd.certs.command import certs
from rankdumpd.coordinator.service import Coordinator
from rankdumpd.endpoint import measured
from rankdumpd.front.service import Front, bring_home_alone
from rankdumpd.gate import Gate
from rankdumpd.ingest.command import take_over
from rankdumpd.ingest.service import IngestRoom
from rankdumpd.ingest.source import check_apart
from rankdumpd.ingest.values import Task
from rankdumpd.leash import Leash
from rankdumpd.meters import Meters
from rankdumpd.server import Server, Service, socket_path
from rankdumpd.settings import AgentSettings, Settings, load
from rankdumpd.tls import Certificates, Revoked, nobody

_EXIT_FAILED = 1
_EXIT_USAGE = 2


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Collect dumps of training jobs: one agent on each host, one coordinator for each job."""


_config = click.option("--config", type=click.Path(path_type=Path), help="TOML file with settings.")
_check = click.option("--check-config", is_flag=True, help="Print the resolved settings and exit.")
_workers = click.option(
    "--workers", type=int, help="Processes that the ranks of this host are shared out to."
)


@main.command()
@_config
@_check
@_workers
@click.option("--as-worker", type=int, hidden=True)  # how a front runs its workers
def agent(
    config: Path | None, check_config: bool, workers: int | None, as_worker: int | None
) -> None:
    """Take tensors from the ranks of this host and write the dump tree."""

    def changed(settings: Settings) -> Settings:
        return dataclasses.replace(settings, agent=_with_workers(settings.agent, workers))

    def serve(settings: Settings) -> int:
        return _serve_agent(settings, None if as_worker is None else Leash())

    who = "" if as_worker is None else f"worker {as_worker} "
    _execute(config, check_config, serve, changed, who=who)


@main.command()
@_config
@_check
def coordinator(config: Path | None, check_config: bool) -> None:
    """Merge what the agents of a job report."""
    _execute(config, check_config, _serve_coordinator)


@main.command()
@_config
@_check
@click.option("--socket", type=click.Path(path_type=Path), help="Unix socket to listen on.")
@click.option("--state-dir", type=click.Path(path_type=Path), help="Folder of the ledger.")
@_workers
@click.option("--until-eof", is_flag=True, help="Stop when standard input ends.")
def standalone(
    config: Path | None,
    check_config: bool,
    socket: Path | None,
    state_dir: Path | None,
    workers: int | None,
    until_eof: bool,
) -> None:
    """Be agent and coordinator of one host on one socket."""

    def changed(settings: Settings) -> Settings:
        agent = _with_workers(settings.agent, workers)
        listen = f"unix:{socket.absolute()}" if socket else agent.listen
        state = str(state_dir.absolute()) if state_dir else agent.state_dir
        agent = dataclasses.replace(agent, listen=listen, coordinator=listen, state_dir=state)
        coordinator = dataclasses.replace(settings.coordinator, state_dir=state)
        return dataclasses.replace(settings, agent=agent, coordinator=coordinator)

    def serve(settings: Settings) -> int:
        if until_eof:
            lifecycle.stop_at_end_of(sys.stdin.fileno())
        return _serve_both(settings, ends_with_job=until_eof)

    _execute(config, check_config, serve, changed)


@main.command()
@click.argument("source", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--into", type=click.Path(path_type=Path), required=True, help="Tree to take it to.")
@click.option("--follow", is_flag=True, help="Go on while the job runs, until a signal.")
@click.option("--until-idle", metavar="SECONDS", type=click.FloatRange(min=0), help="Or so long.")
@click.option("--delete-source", is_flag=True, help="Remove what is committed.")
@click.option("--codec", type=click.Choice(list(CODECS)), default="zstd", show_default=True)
@click.option("--progress", is_flag=True, help="Tell what happens on standard output, in JSON.")
@click.option("--until-eof", is_flag=True, help="Stop when standard input ends.")
def ingest(
    source: Path,
    into: Path,
    follow: bool,
    until_idle: float | None,
    delete_source: bool,
    codec: str,
    progress: bool,
    until_eof: bool,
) -> None:
    """Take over a dump that MindSpore or CANN wrote to DIR by itself."""

    def serve(settings: Settings) -> int:
        if until_eof:
            lifecycle.stop_at_end_of(sys.stdin.fileno())
        task = dataclasses.replace(
            _task(settings.agent, source.absolute(), into.absolute()),
            delete=delete_source,
            clear=delete_source,
            codec=codec,
        )
        machine.give_way(settings.agent.nice)
        return take_over(task, follow=follow, until_idle_s=until_idle, progress=progress)

    _execute(None, False, serve)


main.add_command(certs)


def _with_workers(settings: AgentSettings, workers: int | None) -> AgentSettings:
    return settings if workers is None else dataclasses.replace(settings, workers=workers)


def _agent(settings: Settings, meters: Meters) -> Agent | Front:
    machine.give_way(settings.agent.nice)
    if settings.agent.workers > 1:
        return Front(settings, os.environ, meters=meters)
    bring_home_alone(settings.agent)
    tls = settings.tls
    return Agent(settings.agent, Credentials(tls.ca, tls.certificate, tls.key), meters=meters)


def _door(
    settings: Settings,
    address: str,
    services: Sequence[Service],
    meters: Meters,
    *,
    below_front: bool = False,
) -> Server:
    """Return the server of a process, with what protects it."""
    tls = settings.tls
    audit = Audit(Path(settings.log.audit)) if settings.log.audit else None
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
    return Server(address, services, tls=shown, gate=gate, group=group)


def _task(settings: AgentSettings, source: Path, tree: Path) -> Task:
    threads = settings.encode_threads or machine.cores()
    return Task(source, tree, threads=threads, queue_bytes=settings.queue_bytes)


def _ingest(settings: AgentSettings) -> tuple[IngestRoom, ...]:
    """Return the room that follows the configured folder; none where none is."""
    if not settings.ingest_dir:
        return ()
    source, tree = Path(settings.ingest_dir), Path(settings.ingest_into)
    check_apart(source, tree)
    task = dataclasses.replace(_task(settings, source, tree), delete=settings.ingest_delete)
    return (IngestRoom(task),)


def _serve_agent(settings: Settings, leash: Leash | None) -> int:
    # A folder is followed once on a host, by whoever is above the workers.
    ingest = () if leash else _ingest(settings.agent)
    meters = Meters()
    agent = _agent(settings, meters)
    metrics, page = measured(settings, meters, agent)
    services = (agent, metrics)
    server = _door(settings, settings.agent.listen, services, meters, below_front=bool(leash))
    timeout_s = settings.agent.drain_timeout_s
    rooms = (agent, *ingest, *page)
    return lifecycle.run(rooms, server, drain_timeout_s=timeout_s, leash=leash)


def _serve_coordinator(settings: Settings) -> int:
    meters = Meters()
    coordinator = Coordinator(settings.coordinator, meters=meters)
    metrics, page = measured(settings, meters, coordinator)
    server = _door(settings, settings.coordinator.listen, (coordinator, metrics), meters)
    rooms = (coordinator, *page)
    return lifecycle.run(rooms, server, drain_timeout_s=settings.agent.drain_timeout_s)


def _serve_both(settings: Settings, *, ends_with_job: bool) -> int:
    ingest = _ingest(settings.agent)
    meters = Meters()
    agent = _agent(settings, meters)
    coordinator = Coordinator(settings.coordinator, ends_with_job=ends_with_job, meters=meters)
    metrics, page = measured(settings, meters, agent, coordinator)
    services = (agent, coordinator, metrics)
    server = _door(settings, settings.agent.listen, services, meters)
    rooms = (agent, *ingest, coordinator, *page)
    return lifecycle.run(rooms, server, drain_timeout_s=settings.agent.drain_timeout_s)


def _unchanged(settings: Settings) -> Settings:
    return settings


def _execute(
    config: Path | None,
    check_only: bool,
    serve: Callable[[Settings], int],
    change: Callable[[Settings], Settings] = _unchanged,
    *,
    who: str = "",
) -> None:
    try:
        settings = change(load(config, os.environ))
        if check_only:
            click.echo("\n".join(settings.lines()))
            return
        logs.set_up(settings.log, os.environ, who=who)
        sys.exit(serve(settings))
    except ConfigError as error:
        click.echo(f"rankdumpd: {who}{error}", err=True)
        sys.exit(_EXIT_USAGE)
    except RankdumpError as error:
        click.echo(f"rankdumpd: {who}{error}", err=True)
        sys.exit(_EXIT_FAILED)
