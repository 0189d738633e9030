"""The views of all workers as one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rankdump.contract.status import Load, StatusView


def merged(views: Sequence[StatusView], findings: Iterable[str]) -> StatusView:
    """Return one view of disjoint ranks, with what else there is to say behind it."""
    said = (*(sentence for view in views for sentence in view.findings), *findings)
    return StatusView(
        sessions=tuple(session for view in views for session in view.sessions),
        iterations=tuple(status for view in views for status in view.iterations),
        load=total([view.load for view in views]),
        roots=tuple(dict.fromkeys(root for view in views for root in view.roots)),
        findings=tuple(dict.fromkeys(said)),
    )


def total(loads: Iterable[Load]) -> Load:
    """Return all that is under way, and the room on the fullest disk that any writes to."""
    all_loads = list(loads)
    # A worker without a session knows no disk.
    known = [load for load in all_loads if load.disk_total_bytes]
    fullest = min(known, key=lambda load: load.disk_free_bytes, default=Load())
    return Load(
        queued_records=sum(load.queued_records for load in all_loads),
        queued_bytes=sum(load.queued_bytes for load in all_loads),
        disk_free_bytes=fullest.disk_free_bytes,
        disk_total_bytes=fullest.disk_total_bytes,
    )
