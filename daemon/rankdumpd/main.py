"""The command `rankdumpd`: reads settings, composes a process, runs it."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import click

from rankdump.contract.errors import ConfigError
from rankdumpd import lifecycle
from rankdumpd.agent.service import Agent
from rankdumpd.coordinator.service import Coordinator
from rankdumpd.server import Server
from rankdumpd.settings import Settings, load

_EXIT_USAGE = 2


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Collect dumps of training jobs: one agent on each host, one coordinator for each job."""


_config = click.option("--config", type=click.Path(path_type=Path), help="TOML file with settings.")
_check = click.option("--check-config", is_flag=True, help="Print the resolved settings and exit.")


@main.command()
@_config
@_check
def agent(config: Path | None, check_config: bool) -> None:
    """Take tensors from the ranks of this host and write the dump tree."""
    _execute(config, check_config, _serve_agent)


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
@click.option("--until-eof", is_flag=True, help="Stop when standard input ends.")
def standalone(
    config: Path | None,
    check_config: bool,
    socket: Path | None,
    state_dir: Path | None,
    until_eof: bool,
) -> None:
    """Be agent and coordinator of one host on one socket."""

    def changed(settings: Settings) -> Settings:
        agent = settings.agent
        listen = f"unix:{socket.absolute()}" if socket else agent.listen
        state = str(state_dir.absolute()) if state_dir else agent.state_dir
        agent = dataclasses.replace(agent, listen=listen, coordinator=listen, state_dir=state)
        return dataclasses.replace(settings, agent=agent)

    def serve(settings: Settings) -> int:
        if until_eof:
            lifecycle.stop_at_end_of(sys.stdin.fileno())
        return _serve_both(settings)

    _execute(config, check_config, serve, changed)


def _serve_agent(settings: Settings) -> int:
    agent = Agent(settings.agent)
    server = Server(settings.agent.listen, (agent,))
    return lifecycle.run((agent,), server, drain_timeout_s=settings.agent.drain_timeout_s)


def _serve_coordinator(settings: Settings) -> int:
    coordinator = Coordinator(deadline_s=settings.coordinator.deadline_s)
    server = Server(settings.coordinator.listen, (coordinator,))
    return lifecycle.run((coordinator,), server, drain_timeout_s=settings.agent.drain_timeout_s)


def _serve_both(settings: Settings) -> int:
    agent = Agent(settings.agent)
    coordinator = Coordinator(deadline_s=settings.coordinator.deadline_s)
    server = Server(settings.agent.listen, (agent, coordinator))
    rooms = (agent, coordinator)
    return lifecycle.run(rooms, server, drain_timeout_s=settings.agent.drain_timeout_s)


def _unchanged(settings: Settings) -> Settings:
    return settings


def _execute(
    config: Path | None,
    check_only: bool,
    serve: Callable[[Settings], int],
    change: Callable[[Settings], Settings] = _unchanged,
) -> None:
    try:
        settings = change(load(config, os.environ))
        if check_only:
            click.echo("\n".join(settings.lines()))
            return
        logging.basicConfig(
            stream=sys.stderr,
            level=logging.INFO,
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        )
        sys.exit(serve(settings))
    except ConfigError as error:
        click.echo(f"rankdumpd: {error}", err=True)
        sys.exit(_EXIT_USAGE)
