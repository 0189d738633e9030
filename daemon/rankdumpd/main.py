"""Command line `rankdumpd`: reads the settings, composes a process, runs it and maps errors to exit
codes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from rankdump._cli.command_group import add_version_option
from rankdump._core.daemon_endpoint import DaemonFolder, parse_tcp_address
from rankdump._wire.channel import TlsCredentials, read_credentials
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
from rankdumpd.rebuild import rebuild_ledger
from rankdumpd.server import lifecycle, logs, machine
from rankdumpd.server.lifecycle import SettingsReader
from rankdumpd.server.worker_pipe import WorkerPipe
from rankdumpd.settings import (
    AgentSettings,
    DaemonSettings,
    describe_ignored_variables,
    load_settings,
    name_source,
)
from rankdumpd.start_checks import (
    StartWarning,
    check_agent_settings,
    check_certificates,
    check_coordinator,
    check_coordinator_settings,
    check_health,
)

_logger = logging.getLogger(__name__)
_EXIT_FAILED = 1
_EXIT_USAGE = 2


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@add_version_option("rankdumpd")
def main() -> None:
    """Collect dumps of training jobs: one agent on each host, one coordinator for each job."""


_config = click.option("--config", type=click.Path(path_type=Path), help="TOML file with settings.")
_check = click.option(
    "--check-config",
    is_flag=True,
    help="Print the resolved settings, and on standard error the problems with variables, "
    "certificates and coordinator; exit with status 1 if one of them needs a change, and with 2 if "
    "the daemon would not start.",
)
_workers = click.option(
    "--workers", type=int, help="Number of worker processes over which ranks are distributed."
)


@main.command()
@_config
@_check
@_workers
# only the supervisor of workers uses this option
@click.option("--as-worker", type=int, hidden=True)
def agent(
    config: Path | None, check_config: bool, workers: int | None, as_worker: int | None
) -> None:
    """Receive tensors from the ranks of this host and write the dump tree."""

    def override(settings: DaemonSettings) -> DaemonSettings:
        return dataclasses.replace(settings, agent=_with_workers(settings.agent, workers))

    def serve(settings: DaemonSettings, reread: SettingsReader) -> int:
        return serve_agent(settings, reread, None if as_worker is None else WorkerPipe())

    if as_worker is not None:
        # The supervisor has already checked the settings and certificates of its workers.
        _execute(config, check_config, serve, override, who=f"worker {as_worker} ")
        return
    _execute(
        config,
        check_config,
        serve,
        override,
        check=check_agent_settings,
        reports_to=lambda own: own.agent.coordinator,
        listens=lambda own: own.agent.listen,
    )


@main.command()
@_config
@_check
def coordinator(config: Path | None, check_config: bool) -> None:
    """Merge the events that the agents of jobs report into one execution order."""
    _execute(
        config,
        check_config,
        serve_coordinator,
        check=check_coordinator_settings,
        reports_to=lambda _: "",
        listens=lambda own: own.coordinator.listen,
    )


@main.command()
@_config
@_check
@click.option("--socket", type=click.Path(path_type=Path), help="Unix socket to listen on.")
@click.option("--state-dir", type=click.Path(path_type=Path), help="Folder of the ledger.")
@_workers
# Jobs and `rankdump run` use `--embedded` to start a daemon for themselves, and `--no-coordinator`
# with it for jobs on several hosts.
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
    """Run agent and coordinator of one host on one socket."""
    folder = DaemonFolder(embedded) if embedded else None
    if folder:
        socket, state_dir = folder.socket, folder.state

    def override(settings: DaemonSettings) -> DaemonSettings:
        agent = _with_workers(settings.agent, workers)
        listen = f"unix:{socket.absolute()}" if socket else agent.listen
        state = str(state_dir.absolute()) if state_dir else agent.state_dir
        if (parse_tcp_address(listen) or ("", -1))[1] == 0:
            allowed = "a port: the agent reports to the coordinator at this address"
            raise ConfigError("settings", "agent.listen", listen, allowed)
        coordinator_address = agent.coordinator if no_coordinator else listen
        agent = dataclasses.replace(
            agent, listen=listen, coordinator=coordinator_address, state_dir=state
        )
        coordinator = dataclasses.replace(settings.coordinator, state_dir=state)
        return dataclasses.replace(settings, agent=agent, coordinator=coordinator)

    def serve(settings: DaemonSettings, reread: SettingsReader) -> int:
        if folder is None:
            return serve_both(settings, reread)
        return serve_embedded(settings, reread, folder, merges=not no_coordinator)

    _execute(
        config,
        check_config,
        serve,
        override,
        check=check_agent_settings,
        reports_to=lambda _: "",
        listens=lambda own: own.agent.listen,
    )


@main.command()
@click.argument("source", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--into", type=click.Path(path_type=Path), required=True, help="Dump tree to write.")
@click.option("--follow", is_flag=True, help="Keep following DIR until a signal.")
@click.option(
    "--until-idle",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    help="Follow DIR until no file has arrived for this many seconds.",
)
@click.option(
    "--delete-source", is_flag=True, help="Remove each source file once its copy is committed."
)
@click.option(
    "--codec",
    type=click.Choice(["none", "zstd"]),
    default="zstd",
    show_default=True,
    help="Compression of tensors in the tree.",
)
@click.option("--progress", is_flag=True, help="Report progress on standard output, in JSON lines.")
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
    """Copy a dump that MindSpore or CANN wrote to DIR into a tree of rankdump."""

    def serve(settings: DaemonSettings, _reread: SettingsReader) -> int:
        if until_eof:
            lifecycle.stop_at_end_of_file(sys.stdin.fileno())
        task = dataclasses.replace(
            build_ingest_task(settings.agent, source.absolute(), into.absolute()),
            delete=delete_source,
            clear=delete_source,
            codec=codec,
        )
        machine.raise_descriptor_limit()
        machine.lower_priority(settings.agent.nice)
        return run_ingest(task, follow=follow, until_idle_s=until_idle, progress=progress)

    _execute(None, False, serve, is_daemon=False)


@main.command()
@click.argument("tree", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--state-dir", type=click.Path(path_type=Path), required=True, help="Folder for the new ledger."
)
def rebuild(tree: Path, state_dir: Path) -> None:
    """Rebuild a lost ledger from the manifests of TREE, in a folder without a ledger."""

    def serve(settings: DaemonSettings, _reread: SettingsReader) -> int:
        done = rebuild_ledger(tree.absolute(), state_dir.absolute())
        click.echo(
            f"{state_dir}: new ledger of {done.sessions} sessions, {done.iterations} iterations, "
            f"{done.records} tensors"
        )
        return 0

    _execute(None, False, serve, is_daemon=False)


@main.command()
@click.argument("address", default=AgentSettings().listen)
def health(address: str) -> None:
    """Exit with status 0 if a daemon serves at ADDRESS, else 1; for probes. Over TLS it needs the
    variables RANKDUMP_TLS_CA, RANKDUMP_TLS_CERT and RANKDUMP_TLS_KEY.
    """
    fault = check_health(address, read_credentials(os.environ))
    if fault:
        click.echo(f"rankdumpd: {address}: {fault}", err=True)
        sys.exit(_EXIT_FAILED)


main.add_command(certs)


def _with_workers(settings: AgentSettings, workers: int | None) -> AgentSettings:
    return settings if workers is None else dataclasses.replace(settings, workers=workers)


def _execute(
    config: Path | None,
    check_only: bool,
    serve: Callable[[DaemonSettings, SettingsReader], int],
    change: Callable[[DaemonSettings], DaemonSettings] = lambda settings: settings,
    *,
    who: str = "",
    check: Callable[[DaemonSettings], None] = lambda _: None,
    reports_to: Callable[[DaemonSettings], str] | None = None,
    listens: Callable[[DaemonSettings], str] = lambda _: "",
    is_daemon: bool = True,
) -> None:
    """Check the settings or serve; certificates are checked only if `reports_to` is given.

    The error that ends a daemon is logged; the error that ends a command is printed for its user.
    """

    def reread(environ: Mapping[str, str]) -> DaemonSettings:
        settings = load_settings(config, environ)
        with name_source(config, environ):
            settings = change(settings)
            check(settings)
        return settings

    with _exit_on_error(who) as errors:
        settings = reread(os.environ)
        coordinator = None if reports_to is None else reports_to(settings)
        listen = listens(settings)
        warnings = [] if coordinator is None else _collect_warnings(settings, coordinator, listen)
        if check_only:
            sys.exit(_check_settings(settings, warnings, coordinator or ""))
        logs.set_up_logging(settings.log, os.environ, who=who)
        errors.are_logged = is_daemon
        for warning in warnings:
            _logger.error("%s", warning.text)
        with name_source(config, os.environ):
            sys.exit(serve(settings, reread))


def _collect_warnings(
    settings: DaemonSettings, coordinator: str, listen: str
) -> list[StartWarning]:
    ignored, own = describe_ignored_variables(os.environ), (listen, settings.metrics.listen)
    return [
        *map(StartWarning, ignored),
        *check_certificates(settings.tls, reports_to=coordinator, listens=own),
    ]


@dataclass(slots=True)
class _FatalErrors:
    """How the error that ends this process is reported."""

    are_logged: bool = False
    """Whether the error is logged; if not, it is printed as a plain line."""


@contextlib.contextmanager
def _exit_on_error(who: str) -> Generator[_FatalErrors]:
    """If the block raises an error, end the process with an exit status and one line."""
    errors = _FatalErrors()
    try:
        yield errors
    except RankdumpError as error:
        if errors.are_logged:
            _logger.critical("%s", error)
        else:
            click.echo(f"rankdumpd: {who}{error}", err=True)
        sys.exit(_EXIT_USAGE if isinstance(error, ConfigError) else _EXIT_FAILED)
    except Exception:
        if not errors.are_logged:
            raise
        _logger.critical("an unexpected error ends this process", exc_info=True)
        sys.exit(_EXIT_FAILED)


def _check_settings(
    settings: DaemonSettings, warnings: list[StartWarning], coordinator: str
) -> int:
    """Print the settings and their problems; return the exit status."""
    click.echo("\n".join(settings.lines()))
    if coordinator:
        tls = settings.tls
        warning = check_coordinator(coordinator, TlsCredentials(tls.ca, tls.certificate, tls.key))
        warnings = [*warnings, *([warning] if warning else [])]
    for warning in warnings:
        click.echo(
            f"rankdumpd: {'warning: ' if warning.is_temporary else ''}{warning.text}", err=True
        )
    return 0 if all(warning.is_temporary for warning in warnings) else _EXIT_FAILED
