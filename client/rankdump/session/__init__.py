"""What a training script uses: a session, or the one that the environment asks for."""

from rankdump.session.default import attach, dump_start, dump_stop, limit, set_dump, step
from rankdump.session.lifetime import Session

__all__ = ["Session", "attach", "dump_start", "dump_stop", "limit", "set_dump", "step"]
