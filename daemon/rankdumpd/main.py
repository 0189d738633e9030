"""Command line `rankdumpd`: reads the settings, composes a process, runs it and maps errors to exit
codes.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import click

from rankdump._codec.file_codec import CODECS
from rankdump._core.daemon_endpoint import DaemonFolder
from rankdump._wire.channel import TlsCredentials
from rankdump.errors import ConfigError, RankdumpError
from rankdumpd.certs.command import certs
from rankdumpd.composition import (
    build_ingest_task,
    serve_agent,
    serve_both,
    serve_coordinator,
    serve_embedded,
)
from rankdumpd.ingest.runner import run_ingest
from rankdumpd.rebuild.ledger_rebuild import rebuild_ledger as rebuilt
from rankdumpd.server import lifecycle, logs, machine
from rankdumpd.server.lifecycle import SettingsReader
from rankdumpd.server.worker_pipe import WorkerPipe
from rankdumpd.settings import AgentSettings, DaemonSettings, load_settings
from rankdumpd.start_checks import StartWarning, check_certificates, check_coordinator, check_health

_logger = logging.getLogger(__name__)
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

    def changed(settings: DaemonSettings) -> DaemonSettings:
        return dataclasses.replace(settings, agent=_with_workers(settings.agent, workers))

    def serve(settings: DaemonSettings, reread: SettingsReader) -> int:
        return serve_agent(settings, reread, None if as_worker is None else WorkerPipe())

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
    _execute(config, check_config, serve_coordinator, reports_to=_report_to_nobody)


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

    def changed(settings: DaemonSettings) -> DaemonSettings:
        agent = _with_workers(settings.agent, workers)
        listen = f"unix:{socket.absolute()}" if socket else agent.listen
        state = str(state_dir.absolute()) if state_dir else agent.state_dir
        merges = agent.coordinator if no_coordinator else listen
        agent = dataclasses.replace(agent, listen=listen, coordinator=merges, state_dir=state)
        coordinator = dataclasses.replace(settings.coordinator, state_dir=state)
        return dataclasses.replace(settings, agent=agent, coordinator=coordinator)

    def serve(settings: DaemonSettings, reread: SettingsReader) -> int:
        if folder is None:
            return serve_both(settings, reread)
        return serve_embedded(settings, reread, folder, merges=not no_coordinator)

    _execute(config, check_config, serve, changed, reports_to=_report_to_nobody)


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

    def serve(settings: DaemonSettings, _reread: SettingsReader) -> int:
        if until_eof:
            lifecycle.stop_at_end_of_file(sys.stdin.fileno())
        task = dataclasses.replace(
            build_ingest_task(settings.agent, source.absolute(), into.absolute()),
            delete=delete_source,
            clear=delete_source,
            codec=codec,
        )
        machine.lower_priority(settings.agent.nice)
        return run_ingest(task, follow=follow, until_idle_s=until_idle, progress=progress)

    _execute(None, False, serve)


@main.command()
@click.argument("tree", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--state-dir", type=click.Path(path_type=Path), required=True, help="Folder for it.")
def rebuild(tree: Path, state_dir: Path) -> None:
    """Make the ledger of an agent anew from a tree, in a folder that has none."""

    def serve(settings: DaemonSettings, _reread: SettingsReader) -> int:
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
    fault = check_health(address)
    if fault:
        click.echo(f"rankdumpd: {address}: {fault}", err=True)
        sys.exit(_EXIT_FAILED)


main.add_command(certs)


def _with_workers(settings: AgentSettings, workers: int | None) -> AgentSettings:
    return settings if workers is None else dataclasses.replace(settings, workers=workers)


def _keep_settings(settings: DaemonSettings) -> DaemonSettings:
    return settings


def _report_to_nobody(_settings: DaemonSettings) -> str:
    return ""


def _execute(
    config: Path | None,
    check_only: bool,
    serve: Callable[[DaemonSettings, SettingsReader], int],
    change: Callable[[DaemonSettings], DaemonSettings] = _keep_settings,
    *,
    who: str = "",
    reports_to: Callable[[DaemonSettings], str] | None = None,
) -> None:
    """Check or serve; without `reports_to` nothing but the settings is looked at."""

    def reread(environ: Mapping[str, str]) -> DaemonSettings:
        return change(load_settings(config, environ))

    try:
        settings = reread(os.environ)
        doubts: list[StartWarning] = []
        if reports_to is not None:
            doubts += check_certificates(settings.tls, reports_to=reports_to(settings))
        if check_only:
            sys.exit(_check_settings(settings, doubts, reports_to(settings) if reports_to else ""))
        logs.set_up_logging(settings.log, os.environ, who=who)
        for doubt in doubts:
            _logger.error("%s", doubt.text)
        sys.exit(serve(settings, reread))
    except ConfigError as error:
        click.echo(f"rankdumpd: {who}{error}", err=True)
        sys.exit(_EXIT_USAGE)
    except RankdumpError as error:
        click.echo(f"rankdumpd: {who}{error}", err=True)
        sys.exit(_EXIT_FAILED)


def _check_settings(settings: DaemonSettings, doubts: list[StartWarning], coordinator: str) -> int:
    """Print settings and what is wrong; return the exit status."""
    click.echo("\n".join(settings.lines()))
    if coordinator:
        tls = settings.tls
        found = check_coordinator(coordinator, TlsCredentials(tls.ca, tls.certificate, tls.key))
        doubts = [*doubts, *([found] if found else [])]
    for doubt in doubts:
        click.echo(f"rankdumpd: {'warning: ' if doubt.is_temporary else ''}{doubt.text}", err=True)
    return 0 if all(doubt.is_temporary for doubt in doubts) else _EXIT_FAILED
