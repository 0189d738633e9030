"""What an earlier process left: its sessions are taken up, and what is due of them is done."""

from __future__ import annotations

import logging
from collections.abc import Callable

from rankdumpd import faults
from rankdumpd.agent.effects import Effects
from rankdumpd.agent.registry import Registry
from rankdumpd.agent.sessions import Session
from rankdumpd.logs import about

_log = logging.getLogger(__name__)


def take_up(registry: Registry, effects: Effects, tell: Callable[[Session], None]) -> None:
    """Take up every session, then `tell` of it; one that fails is given up, and the others go on.

    What passes by itself fails nothing here: it waits in the ledger.
    """
    for session in registry.recover():
        try:
            while not effects.apply_due(session):
                pass
            tell(session)
        except Exception as error:
            request = session.request
            _log.exception("what is due is not done", extra=about(request))
            if not faults.passes(error):
                registry.give_up(request.session_id, error)
