"""Commands that send requests to daemons: `rankdump control` changes what a running job dumps or
freezes its black boxes on all hosts, `freeze` freezes those on one host through its agent, and
`pin` and `unpin` start and end the protection of a job's dump from removal by age or size.
"""

from __future__ import annotations

from pathlib import Path

import click

from rankdump._analysis.reader.job_sentences import format_result
from rankdump._cli import daemon_client
from rankdump._cli.live_tree import LiveJob, find_live_job
from rankdump._cli.options import TREE_PATH, resolve_agent_address, resolve_coordinator_address
from rankdump._cli.output import print_json, print_lines
from rankdump._core.job_control import ControlAction
from rankdump._core.status import JobUsage
from rankdump._core.units import format_bytes
from rankdump.errors import RejectedError


@click.command()
@click.argument("job_id", metavar="JOB")
@click.argument(
    "action", metavar="ACTION", type=click.Choice([each.value for each in ControlAction])
)
@click.argument("values", metavar="[VALUE]...", nargs=-1)
@click.option(
    "--coordinator", metavar="ADDRESS", help="Coordinator to ask; default: RANKDUMP_COORDINATOR."
)
@click.option("--tree", type=TREE_PATH, help="Ask the coordinator of the job in this tree.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
def control(
    job_id: str,
    action: str,
    values: tuple[str, ...],
    coordinator: str | None,
    tree: Path | None,
    as_json: bool,
) -> int:
    """Change what JOB dumps, or freeze its black boxes.

    ACTION is one of these words. start dumps every iteration from now on, stop none; iterations
    "0|5-8" dumps these. operators takes entries as in `kernels` of a configuration, or all;
    saved-data takes tensor, statistic or full. All ranks begin with the change in the iteration
    that is printed. freeze [WHY] freezes the black boxes of all ranks, on all hosts. Exit code 1
    when some rank is left out, or begins later.
    """
    if not job_id:
        raise click.UsageError("JOB is empty")
    if tree and coordinator:
        raise click.UsageError("--tree and --coordinator cannot be combined")
    address = _find_coordinator(tree, job_id) if tree else resolve_coordinator_address(coordinator)
    # Imported on use, because loading gRPC takes longer than reporting a wrong argument.
    from rankdump.control import carry_out

    result = carry_out(
        job_id,
        ControlAction(action),
        values,
        coordinator=address,
        warn=lambda text: click.echo(f"rankdump: {text}", err=True),
    )
    if as_json:
        print_json(result, indent=None)
    else:
        print_lines(format_result(job_id, ControlAction(action), values, result))
    return 1 if result.exceptions else 0


def _find_job(tree: Path, job_id: str) -> LiveJob:
    job = find_live_job(tree, job_id)
    if job is None:
        named = f"job {job_id!r}" if job_id else "job"
        raise RejectedError(f"no {named} runs that dumps into {tree}")
    return job


def _find_agent(tree: Path, job_id: str) -> tuple[str, str]:
    """Return the address of an agent of a job, and the id of the job."""
    job = _find_job(tree, job_id)
    if not job.agents:
        raise RejectedError(
            f"job {job.job_id!r} has no agent that can be reached from here: use the host of a "
            "rank, or rankdump control, which asks the coordinator"
        )
    return job.agents[0], job.job_id


def _find_coordinator(tree: Path, job_id: str) -> str:
    job = _find_job(tree, job_id)
    if not job.coordinator:
        raise RejectedError(
            f"job {job_id!r} has no coordinator that can be reached from here: its agents name one "
            "in agent.coordinator"
        )
    return job.coordinator


@click.command()
@click.argument("job_id", metavar="JOB", default="")
@click.option("--agent", metavar="ADDRESS", help="Agent to ask; default: RANKDUMP_AGENT.")
@click.option("--tree", type=TREE_PATH, help="Ask an agent of the job in this tree.")
@click.option("--reason", metavar="TEXT", default="", help="Why, for the report.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
def freeze(job_id: str, agent: str | None, tree: Path | None, reason: str, as_json: bool) -> int:
    """Freeze the black box of JOB.

    The latest steps of all its ranks become a frozen tree, whose folder on the host of the agent is
    printed; `rankdump faults` reads it. With a coordinator the agents of all hosts freeze theirs,
    else that of this host alone. JOB may be left out when one job only has a black box. Exit code 1
    when nothing is frozen.
    """
    if tree and agent:
        raise click.UsageError("--tree and --agent cannot be combined")
    address = ""
    if tree:
        address, job_id = _find_agent(tree, job_id)
    found = daemon_client.freeze_job(address or resolve_agent_address(agent), job_id, reason)
    if as_json:
        print_json(found, indent=None)
    else:
        print_lines([*(f"frozen tree: {tree}" for tree in found.trees), *found.notes])
    return 0


@click.command()
@click.argument("job_id", metavar="JOB")
@click.option("--agent", metavar="ADDRESS", help="Agent to ask; default: RANKDUMP_AGENT.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
def pin(job_id: str, agent: str | None, as_json: bool) -> int:
    """Protect the dump of JOB from removal.

    Until `unpin`, the agent of this host removes no iteration of the job by age or size. A job can
    be pinned before it starts.
    """
    return _set_pinned(job_id, agent, pinned=True, as_json=as_json)


def _set_pinned(job_id: str, agent: str | None, *, pinned: bool, as_json: bool) -> int:
    """Pin or unpin a job, and print the size of its dump on the agent."""
    if not job_id:
        raise click.UsageError("JOB is empty")
    address = resolve_agent_address(agent)
    daemon_client.set_job_pin(address, job_id, pinned=pinned)
    known = {job.job_id: job for job in daemon_client.fetch_agent_status(address).usage}
    job = known.get(job_id, JobUsage(job_id, pinned=pinned))
    if as_json:
        body = {"job_id": job_id, "pinned": job.pinned, "bytes_stored": job.bytes_stored}
        print_json(body, indent=None)
    else:
        now = "is pinned" if job.pinned else "is not pinned"
        here = format_bytes(job.bytes_stored) if job.bytes_stored else "nothing yet"
        print_lines([f"job {job_id} {now}; its dump on this host: {here}"])
    return 0


@click.command()
@click.argument("job_id", metavar="JOB")
@click.option("--agent", metavar="ADDRESS", help="Agent to ask; default: RANKDUMP_AGENT.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
def unpin(job_id: str, agent: str | None, as_json: bool) -> int:
    """Allow removal of old iterations of JOB again."""
    return _set_pinned(job_id, agent, pinned=False, as_json=as_json)
