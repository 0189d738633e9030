"""Sessions as a training script drives them: the plan, the agent and the framework adapters of a
rank, and its dump from start to end.
"""

from __future__ import annotations

from rankdump._session.default_session import (
    attach,
    dump_start,
    dump_stop,
    layout,
    limit,
    microbatch,
    note,
    set_dump,
    step,
)
from rankdump._session.rank_session import Session

__all__ = [
    "Session",
    "attach",
    "dump_start",
    "dump_stop",
    "layout",
    "limit",
    "microbatch",
    "note",
    "set_dump",
    "step",
]
