"""Command `rankdump run`: runs a job as a child process beside an embedded daemon, forwards signals
to it, prints a summary of what was collected, and returns the exit code of the job.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType

import click

from rankdump import reader
from rankdump._analysis.reader.job_sentences import (
    format_causes,
    format_findings,
    format_urgent_hints,
)
from rankdump._analysis.reader.rank_tallies import format_status_sentences, sum_iterations
from rankdump._cli.config import try_tree
from rankdump._cli.daemon_client import drain_agent, fetch_agent_status
from rankdump._cli.forecast import check_plan_fit
from rankdump._cli.options import TREE_PATH, parse_iterations_option
from rankdump._cli.output import measure_width, print_lines, print_table
from rankdump._cli.signal_handlers import handle_signals
from rankdump._cli.status_tables import format_summary_table
from rankdump._cli.twice_run import CONFIG_NAME, check_new_trees, make_exact_config, run_twice
from rankdump._config import config_file
from rankdump._config.output_path import BASELINE_VARIABLE, OUTPUT_VARIABLE
from rankdump._config.rankdump_section import BLACK_BOX_VARIABLE, is_black_box_forced
from rankdump._core.determinism import PERTURB_VARIABLE, PERTURBATIONS
from rankdump._core.events import Finding
from rankdump._core.plan import DumpPlan, IterationSelection
from rankdump._core.rank_identity import WARNED_VARIABLE
from rankdump._core.status import StatusView, is_rejection
from rankdump._embedded_daemon import DaemonLease
from rankdump._session.plan_source import (
    NATIVE_VARIABLE,
    STARTED_FORMAT,
    STARTED_VARIABLE,
    remove_native_dump,
)
from rankdump.errors import CorruptedError, RankdumpError, UnavailableError

EXIT_NOT_FOUND, EXIT_NOT_EXECUTABLE = 127, 126

_CONFIG_NAMES = ("RANKDUMP_CONFIG", "MINDSPORE_DUMP_CONFIG")
_DRAIN_TIMEOUT_S = 60.0


def run_job(command: Sequence[str], environ: Mapping[str, str], *, quiet: bool = False) -> int:
    """Run a command to its end; return its exit code as a shell does, 128 + n after signal n.

    With `quiet` the output of the command goes to stderr, because stdout is for a report.
    """
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        elif not (number == signal.SIGINT and _is_in_foreground()):
            child.send_signal(number)

    with handle_signals(forward):
        try:
            out = sys.stderr if quiet else None
            child = subprocess.Popen(command, env=dict(environ), stdout=out)
        except OSError as error:
            is_missing = isinstance(error, FileNotFoundError)
            cause = "no such command" if is_missing else error.strerror
            click.echo(f"rankdump: {command[0]}: {cause}", err=True)
            return EXIT_NOT_FOUND if is_missing else EXIT_NOT_EXECUTABLE
        for number in early:
            child.send_signal(number)
        code = child.wait()
    return code if code >= 0 else 128 - code


def exit_on_signals() -> AbstractContextManager[None]:
    """Exit with every clean-up if a signal arrives while the job is not running."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    return handle_signals(leave, numbers=(signal.SIGTERM, signal.SIGHUP))


def _is_in_foreground() -> bool:
    """Return whether Ctrl-C reached the child as well, because a terminal signals a whole group."""
    try:
        return os.tcgetpgrp(sys.__stdin__.fileno()) == os.getpgrp() if sys.__stdin__ else False
    except (OSError, ValueError):
        return False


@contextmanager
def run_embedded_daemon(job_id: str, *, keep_log: bool) -> Generator[DaemonLease, None, None]:
    """Run a daemon during a block; UnavailableError when it does not start.

    Its log is kept with `keep_log`, or if the daemon failed.
    """
    lease = DaemonLease(job_id)
    try:
        if not lease.wait_until_serving():
            raise UnavailableError(
                f"the embedded daemon has not started in time; its log: {lease.log}"
            )
        yield lease
    finally:
        fault = lease.close(keep_log=keep_log)
        if fault:
            click.echo(f"rankdump: {fault}", err=True)
        if lease.log.exists():
            click.echo(f"daemon log: {lease.log}", err=True)


# All words after the first word of COMMAND belong to COMMAND, whatever options this command gets.
@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="What to dump: a data_dump.json or an acl.json.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Root of the tree, in place of the configured one.",
)
@click.option(
    "--require-fit", is_flag=True, help="Do not start COMMAND if its dump does not fit on the disk."
)
@click.option(
    "--observed",
    metavar="TREE",
    type=TREE_PATH,
    help="Tree of an earlier dump, from which --require-fit estimates; default: the configured "
    "tree.",
)
@click.option(
    "--blackbox",
    is_flag=True,
    help="Keep the latest steps of every rank in memory as a black box, and write them to a tree "
    "when a fault is found. Without a configuration, nothing else is collected, and the tree is "
    "below --output.",
)
@click.option(
    "--baseline",
    metavar="TREE",
    type=TREE_PATH,
    help="Earlier dump; tensors that are the same in it get no files.",
)
@click.option(
    "--perturb",
    type=click.Choice(PERTURBATIONS),
    help="Make a noise run for `rankdump diff --noise`: the first floating input of each call of "
    "an attached model is moved by one unit in its last place.",
)
@click.option(
    "--twice",
    is_flag=True,
    help="Run COMMAND two times, into the trees `first` and `second` below --output or the "
    "configured tree, and report the first operator of each rank that is not deterministic. "
    "Without a configuration, statistics and fingerprints of all operators are kept.",
)
@click.option(
    "--iteration",
    "iterations",
    callback=parse_iterations_option,
    help='With --twice and without a configuration: only these iterations, such as "0|2-3".',
)
@click.option(
    "--json", "as_json", is_flag=True, help="With --twice: print one JSON object to stdout."
)
@click.option("--keep-daemon-log", is_flag=True, help="Keep the log of the embedded daemon.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    *,
    config: Path | None,
    output: Path | None,
    require_fit: bool,
    observed: Path | None,
    blackbox: bool,
    baseline: Path | None,
    perturb: str | None,
    twice: bool,
    iterations: IterationSelection | None,
    as_json: bool,
    keep_daemon_log: bool,
    command: tuple[str, ...],
) -> int:
    """Run a command and collect its tensors.

    An embedded daemon runs as long as COMMAND; a summary of the dump follows. Without a
    configuration, COMMAND itself selects what to dump, for example with rankdump.migrator.

    The exit code is that of COMMAND; messages of rankdump go to stderr. With --require-fit, COMMAND
    is not started and the exit code is 1 if the dump needs more disk space than there is, or a
    manifest of the earlier dump cannot be read. With --twice it is 1 if the runs differ, and 0 if
    all their bits are the same.
    """
    given = dict(os.environ)
    if baseline is not None:
        given[BASELINE_VARIABLE] = str(baseline.absolute())
    if perturb:
        given[PERTURB_VARIABLE] = perturb  # the first rank warns that results change
    if twice:
        if blackbox or require_fit:
            raise click.UsageError("--twice has no --blackbox and no --require-fit")
        root, environ = _prepare_twice(given, config, output, iterations)
        run_once = partial(_run_collected, command, quiet=as_json, keep_log=keep_daemon_log)
        return run_twice(run_once, environ, root, as_json=as_json)
    if iterations is not None or as_json:
        raise click.UsageError("--iteration and --json need --twice")
    environ = _set_configuration(given, config=config, output=output, blackbox=blackbox)
    if require_fit:
        plan = _load_plan(environ)
        if plan is None:
            raise click.UsageError("--require-fit needs a configuration: give --config")
        fault = check_plan_fit(plan, observed) if plan.enabled else ""
        if fault:
            print_lines([f"rankdump: {fault}"], err=True)
            return 1
    return _run_collected(command, environ, keep_log=keep_daemon_log)


def _prepare_twice(
    environ: Mapping[str, str],
    config: Path | None,
    output: Path | None,
    iterations: IterationSelection | None,
) -> tuple[Path, dict[str, str]]:
    """Return the folder for both trees, and the environment of both runs."""
    has_config = config is not None or any(environ.get(name) for name in _CONFIG_NAMES)
    if has_config and iterations is not None:
        raise click.UsageError("--iteration is for --twice without a configuration, which has it")
    if not has_config:
        found = output or (Path(environ[OUTPUT_VARIABLE]) if environ.get(OUTPUT_VARIABLE) else None)
        if found is None:
            raise click.UsageError("--twice without a configuration needs --output")
        output = found.absolute()
        check_new_trees(output)
        output.mkdir(parents=True, exist_ok=True)
        config = output / CONFIG_NAME
        config.write_text(make_exact_config(output, iterations))
    prepared = _set_configuration(environ, config=config, output=output, blackbox=False)
    plan = _load_plan(prepared)
    if plan is None or not plan.enabled:
        raise click.UsageError("--twice needs a configuration that enables a dump")
    root = Path(plan.output.root)
    check_new_trees(root)
    # Both runs write to time folders with the same name, if the layout has time folders.
    return root, {STARTED_VARIABLE: time.strftime(STARTED_FORMAT), **prepared}


def _load_plan(environ: Mapping[str, str]) -> DumpPlan | None:
    """Return the plan of a job with this environment; None if the job itself creates its plan."""
    if "RANKDUMP_CONFIG" in environ:
        return config_file.load_config_plan(Path(environ["RANKDUMP_CONFIG"]), environ)[0]
    if is_black_box_forced(environ) and environ.get(OUTPUT_VARIABLE):
        return config_file.make_black_box_plan(environ)[0]
    return None


def _run_collected(
    command: Sequence[str], environ: Mapping[str, str], *, keep_log: bool, quiet: bool = False
) -> int:
    """Run a job beside a daemon, print what was collected, and return the exit code of the job."""
    plan = _load_plan(environ)
    if plan is not None:
        fault = try_tree(plan)
        if fault:
            raise click.UsageError(fault)
        print_lines((f"rankdump: warning: {text}" for text in plan.warnings), err=True)
    if plan is not None and "RANKDUMP_CONFIG" in environ:
        environ = _without_native_dump(environ, plan)
    job_id = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}"
    with exit_on_signals(), run_embedded_daemon(job_id, keep_log=keep_log) as daemon:
        print_lines([_describe_start(plan, daemon.address)], err=True)
        # All ranks write to the same time folder, if the layout has time folders.
        own = {STARTED_VARIABLE: time.strftime(STARTED_FORMAT), **environ}
        own |= {"RANKDUMP_AGENT": daemon.address, "RANKDUMP_COORDINATOR": daemon.address}
        own |= {"RANKDUMP_JOB_ID": job_id}
        code = run_job(command, own, quiet=quiet)
        view = _collect_status(daemon, plan)
        died = not daemon.alive
    _print_summary(view, plan, code, daemon_died=died)
    for root in _roots(plan, view):
        print_lines(_describe_findings(root, job_id), err=True)
    return code


def _describe_start(plan: DumpPlan | None, address: str) -> str:
    """Return the line that is printed at the start of a job: where its dump is written, and how to
    see its status.
    """
    if plan is None or not plan.enabled:
        return f"rankdump: daemon at {address}"
    root = plan.output.root
    return f"rankdump: tree {root}, daemon at {address}; while it runs: rankdump status {root}"


def _without_native_dump(environ: Mapping[str, str], plan: DumpPlan) -> dict[str, str]:
    """Return the environment without variables for MindSpore's own dump; print which
    are removed.
    """
    found = remove_native_dump(environ, plan.output.root)
    if NATIVE_VARIABLE in environ and NATIVE_VARIABLE not in found:
        text = (
            f"{NATIVE_VARIABLE} is removed from the environment of the command: "
            "MindSpore would dump the same tensors again"
        )
        print_lines([f"rankdump: {text}"], err=True)
    return found


def _set_configuration(
    environ: Mapping[str, str], *, config: Path | None, output: Path | None, blackbox: bool
) -> dict[str, str]:
    """Return the environment with absolute paths, because the job may run in another folder."""
    own = {BLACK_BOX_VARIABLE: "1"} if blackbox else {}
    if output is not None:
        own[OUTPUT_VARIABLE] = str(output.absolute())
    found = config or next((Path(environ[n]) for n in _CONFIG_NAMES if environ.get(n)), None)
    if found is None:
        if output is not None and not blackbox:
            raise click.UsageError("--output needs a configuration: give --config")
        if blackbox and not (output or environ.get(OUTPUT_VARIABLE)):
            raise click.UsageError("--blackbox without a configuration needs --output")
        return {n: text for n, text in environ.items() if n not in _CONFIG_NAMES} | own
    file = str(found.absolute())
    return {**environ, "RANKDUMP_CONFIG": file, WARNED_VARIABLE: file, **own}


def _roots(plan: DumpPlan | None, view: StatusView) -> tuple[str, ...]:
    return view.roots if plan is None else (plan.output.root,)


def _collect_status(daemon: DaemonLease, plan: DumpPlan | None) -> StatusView:
    """Return the daemon's status once everything is written; if the daemon died, the status of the
    tree.
    """
    try:
        left = drain_agent(daemon.address, timeout_s=_DRAIN_TIMEOUT_S)
        if left:
            print_lines([f"rankdump: {left} tensors are not written yet"], err=True)
        return fetch_agent_status(daemon.address)
    except RankdumpError as error:
        if plan is None:
            print_lines([f"rankdump: {error}"], err=True)
            return StatusView()
        print_lines([f"rankdump: {error}; the summary below is read from the tree"], err=True)
        return reader.status(Path(plan.output.root))


def _print_summary(
    view: StatusView, plan: DumpPlan | None, code: int, *, daemon_died: bool
) -> None:
    print_lines((f"rankdump: {root}" for root in _roots(plan, view)), err=True)
    if code in (EXIT_NOT_FOUND, EXIT_NOT_EXECUTABLE) and not view.sessions:
        return
    if not view.sessions and not view.iterations:
        cause = "no iteration was complete when the daemon died"
        rejected = [text for text in view.findings if is_rejection(text)]
        likely = "; ".join(rejected) or _likely_cause(code, plan)
        text = cause if daemon_died else f"no rank connected: {likely}"
        # The remaining findings name ranks that opened a session and never connected.
        others = [each for each in view.findings if daemon_died or each not in rejected]
        print_lines([text, *others], err=True)
        return
    if plan is None or plan.selection.iterations.spans != ():
        print_table(format_summary_table(view, width=measure_width(err=True)), err=True)
        print_lines(format_status_sentences(view), err=True)
        if not sum_iterations(view.iterations).kept:
            print_lines(["nothing was dumped"], err=True)
    if plan is not None and plan.black_box.steps:
        frozen = (
            f"the black box was frozen: {each.text}; rankdump faults {each.root}"
            for each in view.black_box.freezes
        )
        print_lines([*frozen] or ["the black box was not frozen"], err=True)


def _describe_findings(root: str, job_id: str) -> list[str]:
    """Return the findings in the order of the job, and its urgent timeout hints.

    Both are read from the tree, because the daemon publishes its last results when it stops.
    """
    lines: list[str] = []
    found: tuple[Finding, ...] = ()
    # Neither file exists if nothing was published.
    with suppress(CorruptedError):
        order = reader.read_order(Path(root), job_id=job_id)
        found = order.findings
        lines += format_findings(order.findings, where=root, attempts=order.attempts)
    with suppress(CorruptedError):
        hints = reader.read_hints(Path(root), job_id)
        lines += [*format_urgent_hints(hints), *format_causes(hints, found)]
    return lines


def _likely_cause(code: int, plan: DumpPlan | None) -> str:
    if plan is None:
        names = " or ".join(_CONFIG_NAMES)
        return (
            f"no configuration (--config FILE, or {names}), and the command never called "
            f"rankdump.migrator.api_dump_start"
        )
    if not plan.enabled:
        return "the configuration enables no dump"
    if code:
        return f"the command ended with code {code} before that"
    return (
        "the command never opened a session (rankdump.attach, rankdump.Session, rankdump.acl), "
        "or its ranks run where RANKDUMP_AGENT is not passed on, such as on another host or in a "
        "container"
    )
