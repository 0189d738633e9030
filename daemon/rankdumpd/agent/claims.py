"""Which second a session has for itself, where a folder of the tree is named by one.

In CANN's trees nothing but that second and the device's number tells sessions apart, and ranks of
several hosts have devices of one number. Whoever comes second takes the next second.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import datetime, timedelta

from rankdump.contract.hold import FOLDER
from rankdump.contract.layout.place import Stand
from rankdumpd.agent.tree import Tree

_FORM = "%Y%m%d%H%M%S"
_MOST = 4096

_log = logging.getLogger(__name__)


def claimed(tree: Tree, stand: Stand, *, job_id: str, rank: int) -> Stand:
    """Return a stand that no other rank or job has; the same again for the same rank."""
    try:
        began = datetime.strptime(stand.started, _FORM)
        for seconds in range(_MOST):
            started = (began + timedelta(seconds=seconds)).strftime(_FORM)
            if tree.claim(FOLDER, f"{started}.{stand.device}", f"rank {rank} of {job_id!r}"):
                return replace(stand, started=started)
    except (ValueError, OverflowError, OSError) as error:
        # A disk that cannot be written is said where the session is let in.
        who = {"job": job_id, "rank": rank}
        _log.warning("rank %d of job %r: no folder claimed: %s", rank, job_id, error, extra=who)
    return stand
