"""Ends of sessions that no file states: the agent of an open session does not answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rankdump._analysis.reader.query import ranges
from rankdump._core.status import SessionState, SessionStatus, StatusView
from rankdump._core.tree_session import TreeSession


def mark_ended_sessions(view: StatusView, files: Sequence[TreeSession], host: str) -> StatusView:
    """Return a view of a tree whose daemons do not answer, with the sessions that this ended.

    A session that its file calls open has ended with its agent, if that ran on this host; of an
    agent of another host that is not known.
    """
    filed = {each.status.session_id: each for each in files}
    gone: list[int] = []
    unknown: dict[str, list[int]] = {}
    sessions: list[SessionStatus] = []
    for status in view.sessions:
        file = filed.get(status.session_id)
        if file is not None and status.state is SessionState.OPEN:
            if file.agent_host == host:
                gone.append(status.rank)
                status = replace(status, state=SessionState.LOST)
            else:
                unknown.setdefault(file.agent_host, []).append(status.rank)
        sessions.append(status)
    findings = list(view.findings)
    if gone:
        findings.append(f"{_name_ranks(gone)}: the agent ended while the session was open")
    findings += (
        f"{_name_ranks(ranks)}: the agent runs on host {name} and cannot be asked from here; the "
        "state shown is the last one that it wrote"
        for name, ranks in unknown.items()
    )
    return replace(view, sessions=tuple(sessions), findings=tuple(findings))


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(set(ranks)) > 1)} {ranges(ranks)}"
