"""The command `rankdumpd`: reads settings, composes a process, runs it."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import click

from rankdump.codec import CODECS
from rankdump.contract.daemon_folder import DaemonFolder
from rankdump.contract.errors import ConfigError, RankdumpError
from rankdump.wire.channel import Credentials
from rankdumpd import lifecycle, logs, machine
from rankdumpd.certs.command import certs
from rankdumpd.ingest.command import take_over
from rankdumpd.leash import Leash
from rankdumpd.lifecycle import Reread
from rankdumpd.rebuild.command import rebuild as rebuilt
from rankdumpd.serving import (
    ingest_task,
    serve_agent,
    serve_both,
    serve_coordinator,
    serve_embedded,
)
from rankdumpd.settings import AgentSettings, Settings, load
from rankdumpd.startcheck import Doubt, coordinator_doubt, doubts_about, health_fault

_log = logging.getLogger(__name__)
_EXIT_FAILED = 1
_EXIT_USAGE = 2


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="rankdump", prog_name="rankdumpd")
def main() -> None:
    """Collect dumps of training jobs: one agent on each host, one coordinator for each job."""


_config = click.option("--config", type=click.Path(path_type=Path), help="TOML file with settings.")
_check = click.option(
    "--check-config",
    is_flag=True,
    help="Print the resolved settings, and on standard error what is wrong with certificates and "
    "the coordinator; status 1 when something has to be changed.",
)
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

    def serve(settings: Settings, reread: Reread) -> int:
        return serve_agent(settings, reread, None if as_worker is None else Leash())

    if as_worker is not None:
        # Its front has looked at the files.
        _execute(config, check_config, serve, changed, who=f"worker {as_worker} ")
        return
    _execute(config, check_config, serve, changed, reports_to=lambda own: own.agent.coordinator)


@main.command()
@_config
@_check
def coordinator(config: Path | None, check_config: bool) -> None:
    """Merge what the agents of a job report."""
    _execute(config, check_config, serve_coordinator, reports_to=_nobody)


@main.command()
@_config
@_check
@click.option("--socket", type=click.Path(path_type=Path), help="Unix socket to listen on.")
@click.option("--state-dir", type=click.Path(path_type=Path), help="Folder of the ledger.")
@_workers
# How a job or `rankdump run` brings a daemon along, and that the job spans other hosts.
@click.option("--embedded", metavar="FOLDER", type=click.Path(path_type=Path), hidden=True)
@click.option("--no-coordinator", is_flag=True, hidden=True)
def standalone(
    config: Path | None,
    check_config: bool,
    socket: Path | None,
    state_dir: Path | None,
    workers: int | None,
    embedded: Path | None,
    no_coordinator: bool,
) -> None:
    """Be agent and coordinator of one host on one socket."""
    folder = DaemonFolder(embedded) if embedded else None
    if folder:
        socket, state_dir = folder.socket, folder.state

    def changed(settings: Settings) -> Settings:
        agent = _with_workers(settings.agent, workers)
        listen = f"unix:{socket.absolute()}" if socket else agent.listen
        state = str(state_dir.absolute()) if state_dir else agent.state_dir
        merges = agent.coordinator if no_coordinator else listen
        agent = dataclasses.replace(agent, listen=listen, coordinator=merges, state_dir=state)
        coordinator = dataclasses.replace(settings.coordinator, state_dir=state)
        return dataclasses.replace(settings, agent=agent, coordinator=coordinator)

    def serve(settings: Settings, reread: Reread) -> int:
        if folder is None:
            return serve_both(settings, reread)
        return serve_embedded(settings, reread, folder, merges=not no_coordinator)

    _execute(config, check_config, serve, changed, reports_to=_nobody)


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

    def serve(settings: Settings, _reread: Reread) -> int:
        if until_eof:
            lifecycle.stop_at_end_of(sys.stdin.fileno())
        task = dataclasses.replace(
            ingest_task(settings.agent, source.absolute(), into.absolute()),
            delete=delete_source,
            clear=delete_source,
            codec=codec,
        )
        machine.give_way(settings.agent.nice)
        return take_over(task, follow=follow, until_idle_s=until_idle, progress=progress)

    _execute(None, False, serve)


@main.command()
@click.argument("tree", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--state-dir", type=click.Path(path_type=Path), required=True, help="Folder for it.")
def rebuild(tree: Path, state_dir: Path) -> None:
    """Make the ledger of an agent anew from a tree, in a folder that has none."""

    def serve(settings: Settings, _reread: Reread) -> int:
        done = rebuilt(tree.absolute(), state_dir.absolute())
        click.echo(
            f"{state_dir}: ledger of {done.sessions} sessions, {done.iterations} iterations, "
            f"{done.records} tensors"
        )
        return 0

    _execute(None, False, serve)


@main.command()
@click.argument("address", default=AgentSettings().listen)
def health(address: str) -> None:
    """Say by the exit status whether a daemon of this host serves at ADDRESS; for probes."""
    fault = health_fault(address)
    if fault:
        click.echo(f"rankdumpd: {address}: {fault}", err=True)
        sys.exit(_EXIT_FAILED)


main.add_command(certs)


def _with_workers(settings: AgentSettings, workers: int | None) -> AgentSettings:
    return settings if workers is None else dataclasses.replace(settings, workers=workers)


def _unchanged(settings: Settings) -> Settings:
    return settings


def _nobody(_settings: Settings) -> str:
    return ""


def _execute(
    config: Path | None,
    check_only: bool,
    serve: Callable[[Settings, Reread], int],
    change: Callable[[Settings], Settings] = _unchanged,
    *,
    who: str = "",
    reports_to: Callable[[Settings], str] | None = None,
) -> None:
    """Check or serve; without `reports_to` nothing but the settings is looked at."""

    def reread(environ: Mapping[str, str]) -> Settings:
        return change(load(config, environ))

    try:
        settings = reread(os.environ)
        doubts: list[Doubt] = []
        if reports_to is not None:
            doubts += doubts_about(settings.tls, reports_to=reports_to(settings))
        if check_only:
            sys.exit(_checked(settings, doubts, reports_to(settings) if reports_to else ""))
        logs.set_up(settings.log, os.environ, who=who)
        for doubt in doubts:
            _log.error("%s", doubt.text)
        sys.exit(serve(settings, reread))
    except ConfigError as error:
        click.echo(f"rankdumpd: {who}{error}", err=True)
        sys.exit(_EXIT_USAGE)
    except RankdumpError as error:
        click.echo(f"rankdumpd: {who}{error}", err=True)
        sys.exit(_EXIT_FAILED)


def _checked(settings: Settings, doubts: list[Doubt], coordinator: str) -> int:
    """Print settings and what is wrong; return the exit status."""
    click.echo("\n".join(settings.lines()))
    if coordinator:
        tls = settings.tls
        found = coordinator_doubt(coordinator, Credentials(tls.ca, tls.certificate, tls.key))
        doubts = [*doubts, *([found] if found else [])]
    for doubt in doubts:
        click.echo(f"rankdumpd: {'warning: ' if doubt.passes else ''}{doubt.text}", err=True)
    return 0 if all(doubt.passes for doubt in doubts) else _EXIT_FAILED
