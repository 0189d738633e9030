"""Data about the running job of a tree from its daemons, which the tree's session files name. If a
daemon does not answer, or does not know the job, the job has ended, and the tree is read. gRPC is
imported on use.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from rankdump import reader
from rankdump._analysis.reader.coordinator_files import PublishedOrder
from rankdump._analysis.reader.manifests import read_tree_sessions
from rankdump._core.daemon_endpoint import is_socket_address
from rankdump._core.events import Finding
from rankdump._core.status import StatusView
from rankdump._core.timeouts import TimeoutHint
from rankdump._core.tree_session import list_addresses, select_running_sessions
from rankdump.errors import RankdumpError

_ANSWER_TIMEOUT_S = 5.0
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class LiveJob:
    """Running job of a tree, with the daemons that can be called about it."""

    job_id: str
    coordinator: str
    """Address of the coordinator; empty if there is none, or if this host cannot reach it."""
    agents: tuple[str, ...]


def find_live_job(tree: Path, job_id: str = "") -> LiveJob | None:
    """Return the running job of a tree if a daemon of it may answer; None when every
    job has ended.
    """
    running = select_running_sessions(read_tree_sessions(tree, job_id))
    if not running:
        return None
    coordinator, agents = list_addresses(running, socket.gethostname())
    alive = tuple(filter(_has_socket, agents))
    coordinator = coordinator if _has_socket(coordinator) else ""
    if not (coordinator or alive):
        return None
    return LiveJob(running[0].status.job_id, coordinator, alive)


def _has_socket(address: str) -> bool:
    """Return whether a daemon may listen at an address; if its socket file is gone, none does."""
    if not address:
        return False
    return not is_socket_address(address) or Path(address.removeprefix("unix:")).exists()


def fetch_live_status(job: LiveJob) -> StatusView | None:
    """Return the status of a running job; None when no daemon that knows it answers."""
    # Imported on use, because loading gRPC takes longer than reading a tree.
    from rankdump._cli.daemon_client import fetch_agent_status, fetch_job_status

    merged = _ask_coordinator(job, fetch_job_status)
    if merged is not None:
        return merged
    # Each agent only knows its own ranks.
    views: list[StatusView] = []
    for address in job.agents:
        try:
            view = fetch_agent_status(address, timeout_s=_ANSWER_TIMEOUT_S)
        except RankdumpError:
            continue
        if any(each.job_id == job.job_id for each in view.sessions):
            views.append(view)
    if not views:
        return None
    sessions = (each for view in views for each in view.sessions)
    iterations = (each for view in views for each in view.iterations)
    return replace(
        views[0],
        sessions=tuple(each for each in sessions if each.job_id == job.job_id),
        iterations=tuple(each for each in iterations if each.job_id == job.job_id),
        findings=tuple(dict.fromkeys(each for view in views for each in view.findings)),
    )


def add_tree_rows(live: StatusView, tree: StatusView) -> StatusView:
    """Return a live view, completed with what only the tree has: other jobs, and unfinished
    iterations of this job, which daemons report only when they end.
    """
    own = {each.job_id for each in live.sessions}
    # By place and not by session, which files without a manifest do not name: on a full disk, a
    # daemon reports iterations whose manifests are yet to be written.
    reported = {(each.rank, each.iteration, each.attempt) for each in live.iterations}
    begun = (
        each
        for each in tree.iterations
        if each.job_id in own
        and not each.complete
        and (each.rank, each.iteration, each.attempt) not in reported
    )
    return replace(
        live,
        sessions=(*(each for each in tree.sessions if each.job_id not in own), *live.sessions),
        iterations=(
            *(each for each in tree.iterations if each.job_id and each.job_id not in own),
            *live.iterations,
            *begun,
        ),
    )


def fetch_live_findings(job: LiveJob) -> tuple[Finding, ...] | None:
    """Return the findings of a running job; None when its coordinator does not answer."""
    from rankdump._cli.daemon_client import fetch_order_findings

    return _ask_coordinator(job, fetch_order_findings)


def fetch_live_hints(job: LiveJob) -> tuple[TimeoutHint, ...] | None:
    """Return the hints of a running job; None when its coordinator does not answer."""
    from rankdump._cli.daemon_client import fetch_timeout_hints

    return _ask_coordinator(job, fetch_timeout_hints)


def _ask_coordinator(job: LiveJob, fetch: Callable[..., _T]) -> _T | None:
    if not job.coordinator:
        return None
    try:
        return fetch(job.coordinator, job_id=job.job_id, timeout_s=_ANSWER_TIMEOUT_S)
    except RankdumpError:
        return None


def find_unpublished_iterations(
    tree: Path, published: PublishedOrder, job_id: str = ""
) -> tuple[int, ...]:
    """Return the iterations after the last one in an order whose tensors its job has in a tree."""
    last = max((entry.iteration for entry in published.read_last_entries()), default=-1)
    files = read_tree_sessions(tree, job_id)
    if not files:
        return ()
    own = files[-1].status.job_id
    walked = reader.status_of(reader.walk(tree, balances_only=True, job_id=job_id or own))
    mine = (each for each in walked.iterations if each.job_id == own)
    return tuple(sorted({each.iteration for each in mine if each.iteration > last}))
