"""What becomes of an effect that failed: its session waits, or people hear that it is lost."""

from __future__ import annotations

import logging

from rankdump.contract.errors import ExhaustedError
from rankdumpd import faults
from rankdumpd.agent.sessions import Session
from rankdumpd.agent.values import Declared
from rankdumpd.logs import about

_log = logging.getLogger(__name__)


def failed(session: Session, what: str, error: Exception, end: Declared | None = None) -> None:
    """Let the session wait, raising ExhaustedError, or say what is not to be had.

    `end` is the declaration that was being applied, where it is the end of something.
    """
    said = f"rank {session.request.rank}, {what}: {faults.said(error)}"
    if faults.passes(error):
        session.due.set_back(end)
        raise ExhaustedError(f"{said}; it waits in the ledger and is tried again") from None
    # Not marked as applied: the next start of the agent tries again.
    _log.error(said, exc_info=error, extra=about(session.request))
    session.trouble(said)
