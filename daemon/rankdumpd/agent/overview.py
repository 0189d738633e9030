"""Everything an agent knows, as people and scripts see it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rankdump.contract.status import StatusView
from rankdumpd.agent.limits import Limits
from rankdumpd.agent.sessions import Session


def view_of(
    sessions: Sequence[Session], limits: Limits, *, pins: Iterable[str], said: Iterable[str]
) -> StatusView:
    """Return the view of some sessions; `said` is what rooms want people to know."""
    return StatusView(
        sessions=tuple(session.status() for session in sessions),
        iterations=tuple(status for session in sessions for status in session.iterations()),
        load=limits.load_of(sessions),
        roots=tuple(dict.fromkeys(str(session.outlet.tree.root) for session in sessions)),
        findings=(
            *(sentence for session in sessions for sentence in session.findings()),
            *limits.findings(sessions),
            *said,
        ),
        disks=limits.disks_of(sessions),
        usage=limits.jobs(pins),
        memory=limits.memory(sum(session.live for session in sessions)),
    )
