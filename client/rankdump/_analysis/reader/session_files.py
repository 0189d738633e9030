"""Reader of a tree's session files: the sessions that wrote to it, and their state as written last.
Connects to nothing, so a session that is open here may have ended together with its agent.
"""

from __future__ import annotations

from pathlib import Path

from rankdump._core.tree_session import (
    MAX_FILE_BYTES,
    SESSIONS_FOLDER,
    TreeSession,
    parse_tree_session,
)
from rankdump.errors import CorruptedError


def read_tree_sessions(root: Path, job_id: str = "") -> tuple[TreeSession, ...]:
    """Return the session files of a tree, the one that changed last at the end.

    With an id, only those of that job. A file that cannot be read or is damaged is left out: it is
    replaced when the session changes, and the manifests of its iterations remain.
    """
    found: list[TreeSession] = []
    for path in (root / SESSIONS_FOLDER).glob("rank_*.json"):
        try:
            if path.is_symlink() or path.stat().st_size > MAX_FILE_BYTES:
                continue
            session = parse_tree_session(path.read_bytes())
        except (OSError, CorruptedError):
            continue
        if job_id in ("", session.status.job_id):
            found.append(session)
    return tuple(sorted(found, key=lambda each: (each.changed_us, each.status.rank)))
