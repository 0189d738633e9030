"""The views of all workers as one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rankdump.contract.status import StatusView, total_load


def merged(views: Sequence[StatusView], findings: Iterable[str]) -> StatusView:
    """Return one view of disjoint ranks, with what else there is to say behind it."""
    said = (*(sentence for view in views for sentence in view.findings), *findings)
    return StatusView(
        sessions=tuple(session for view in views for session in view.sessions),
        iterations=tuple(status for view in views for status in view.iterations),
        load=total_load(view.load for view in views),
        roots=tuple(dict.fromkeys(root for view in views for root in view.roots)),
        findings=tuple(dict.fromkeys(said)),
    )
