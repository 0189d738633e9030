"""`rankdump run`: an embedded daemon, an armed job, and what was collected from it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import click

from rankdump import reader
from rankdump.cli.ask import agent_status, drain
from rankdump.cli.daemon import embedded_daemon
from rankdump.cli.fitting import check_fit
from rankdump.cli.job import NOT_EXECUTABLE, NOT_FOUND, ending_orderly, run_job
from rankdump.cli.job_view import finding_lines, urgent_lines
from rankdump.cli.options import TREE
from rankdump.cli.ranks import summary_table
from rankdump.cli.screen import say, show_table, table_width
from rankdump.cli.tally import sentences, totals
from rankdump.contract import dialect
from rankdump.contract.errors import DamagedError, RankdumpError
from rankdump.contract.plan import DumpPlan
from rankdump.contract.status import StatusView
from rankdump.embedded import Lease
from rankdump.identity import WARNED_VARIABLE
from rankdump.session.native_dump import NATIVE_VARIABLE, without_native_dump
from rankdump.session.plans import STARTED_FORM, STARTED_VARIABLE

_CONFIG_NAMES = ("RANKDUMP_CONFIG", "MINDSPORE_DUMP_CONFIG")
_DRAIN_TIMEOUT_S = 60.0


@click.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="What to dump: a data_dump.json or an acl.json.",
)
@click.option("--output", type=click.Path(path_type=Path), help="Root of the tree, if not its own.")
@click.option("--require-fit", is_flag=True, help="Do not start what does not fit on the disk.")
@click.option(
    "--observed",
    metavar="TREE",
    type=TREE,
    help="Tree by which --require-fit judges; the one of the configuration by default.",
)
@click.option("--keep-daemon-log", is_flag=True, help="Leave the daemon's log behind.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    *,
    config: Path | None,
    output: Path | None,
    require_fit: bool,
    observed: Path | None,
    keep_daemon_log: bool,
    command: tuple[str, ...],
) -> int:
    """Run a command and collect its tensors.

    An embedded daemon lives as long as COMMAND, then says what it collected. Without a
    configuration that is what COMMAND itself asks for, as with rankdump.migrator.

    The exit code is the command's own; what rankdump has to say goes to stderr. With --require-fit
    it is 1, and COMMAND is not started, where the plan needs more room than there is.
    """
    environ = _with_config(os.environ, config=config, output=output)
    plan = None
    if "RANKDUMP_CONFIG" in environ:
        plan, _ = dialect.load(Path(environ["RANKDUMP_CONFIG"]), environ)
        say((f"rankdump: warning: {text}" for text in plan.warnings), err=True)
        environ = _without_native_dump(environ, plan)
    if require_fit:
        fault = _unfit(plan, observed)
        if fault:
            say([f"rankdump: {fault}"], err=True)
            return 1
    job_id = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}"
    with ending_orderly(), embedded_daemon(job_id, keep_log=keep_daemon_log) as daemon:
        code = run_job(command, _armed(environ, daemon.address, job_id))
        view = _collected(daemon, plan)
        died = not daemon.alive
    _summarise(view, plan, code, daemon_died=died)
    for root in _roots(plan, view):
        say(_oddities(root, job_id), err=True)
    return code


def _without_native_dump(environ: Mapping[str, str], plan: DumpPlan) -> dict[str, str]:
    """Return the environment of a job that rankdump alone dumps, and say what is left out of it."""
    found = without_native_dump(environ, plan.output.root)
    if NATIVE_VARIABLE in environ and NATIVE_VARIABLE not in found:
        text = f"the command runs without {NATIVE_VARIABLE}: MindSpore would dump the same again"
        say([f"rankdump: {text}"], err=True)
    return found


def _unfit(plan: DumpPlan | None, observed: Path | None) -> str:
    if plan is None:
        raise click.UsageError("--require-fit asks for a configuration: give --config")
    return check_fit(plan, observed) if plan.enabled else ""


def _with_config(
    environ: Mapping[str, str], *, config: Path | None, output: Path | None
) -> dict[str, str]:
    """Return the environment with absolute paths: the job may run in another folder."""
    found = config or next((Path(environ[n]) for n in _CONFIG_NAMES if environ.get(n)), None)
    if found is None:
        if output is not None:
            raise click.UsageError("--output is the root of a configuration's tree: give --config")
        return {name: text for name, text in environ.items() if name not in _CONFIG_NAMES}
    file = str(found.absolute())
    own = {"RANKDUMP_CONFIG": file, WARNED_VARIABLE: file}
    if output is not None:
        own["RANKDUMP_OUTPUT"] = str(output.absolute())
    return {**environ, **own}


def _armed(environ: Mapping[str, str], address: str, job_id: str) -> dict[str, str]:
    own = {"RANKDUMP_AGENT": address, "RANKDUMP_COORDINATOR": address, "RANKDUMP_JOB_ID": job_id}
    # All ranks write below the same folder of the time, where a tree has one.
    started = {STARTED_VARIABLE: time.strftime(STARTED_FORM)}
    return {**started, **environ, **own}


def _roots(plan: DumpPlan | None, view: StatusView) -> tuple[str, ...]:
    return view.roots if plan is None else (plan.output.root,)


def _collected(daemon: Lease, plan: DumpPlan | None) -> StatusView:
    """Return what the daemon knows once it has written everything; the tree's word if it died."""
    try:
        left = drain(daemon.address, timeout_s=_DRAIN_TIMEOUT_S)
        if left:
            say([f"rankdump: {left} tensors are still under way"], err=True)
        return agent_status(daemon.address)
    except RankdumpError as error:
        if plan is None:
            say([f"rankdump: {error}"], err=True)
            return StatusView()
        say([f"rankdump: {error}; what follows is read from the tree"], err=True)
        return reader.status(Path(plan.output.root))


def _summarise(view: StatusView, plan: DumpPlan | None, code: int, *, daemon_died: bool) -> None:
    say((f"rankdump: {root}" for root in _roots(plan, view)), err=True)
    if code in (NOT_FOUND, NOT_EXECUTABLE) and not view.sessions:
        return
    if not view.sessions and not view.iterations:
        cause = "nothing was complete when the daemon died"
        likely = _likely_cause(code, plan)
        say([cause if daemon_died else f"no rank connected: {likely}"], err=True)
        return
    show_table(summary_table(view, width=table_width(err=True)), err=True)
    say(sentences(view), err=True)
    if not totals(view.iterations).kept:
        say(["nothing was dumped"], err=True)


def _oddities(root: str, job_id: str) -> list[str]:
    """Return what is odd about the order of the job, and what its timeouts ask for.

    From the tree: the daemon published the last of it when it left.
    """
    lines: list[str] = []
    # A job of which nothing was published has neither file.
    with suppress(DamagedError):
        found = reader.read_order(Path(root), job_id=job_id).findings
        lines += finding_lines(found, where=root)
    with suppress(DamagedError):
        lines += urgent_lines(reader.read_hints(Path(root), job_id))
    return lines


def _likely_cause(code: int, plan: DumpPlan | None) -> str:
    if plan is None:
        names = " or ".join(_CONFIG_NAMES)
        return (
            f"no configuration (--config FILE, or {names}), and the command never called "
            f"rankdump.migrator.api_dump_start"
        )
    if not plan.enabled:
        return "the configuration enables nothing"
    if code:
        return f"the command ended with code {code} before any rank opened a session"
    return (
        "the command never opened a session (rankdump.attach, rankdump.Session, rankdump.acl), "
        "its ranks were refused, which their own lines say, or they run where RANKDUMP_AGENT is "
        "not passed on, such as on another host or in a container"
    )
