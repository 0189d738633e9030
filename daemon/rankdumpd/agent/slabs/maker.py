"""Slabs that are being made, each in a thread of its own, and kept for whoever asks again.

Touching every page of a slab may take longer than a rank waits for an answer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from rankdump.contract.errors import ExhaustedError
from rankdumpd.agent.slabs.file import Slab

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _PendingSlab:
    """One slab, and what became of it."""

    late: Callable[[str], None]
    done: threading.Event = field(default_factory=threading.Event)
    slab: Slab | None = None
    fault: str = ""
    waiting: int = 0
    """How many wait for it now."""
    wanted: bool = True


class SlabMaker:
    """One slab at most for each session; safe to use from several threads."""

    def __init__(self, remove: Callable[[str, Slab], None]) -> None:
        """`remove` takes away a session's slab that nobody wants any more."""
        self._remove = remove
        self._lock = threading.Lock()
        self._slabs: dict[str, _PendingSlab] = {}

    def sessions(self) -> list[str]:
        """Return those whose slab is being made, or waits to be asked for."""
        with self._lock:
            return [who for who, pending in self._slabs.items() if pending.wanted]

    def take(
        self,
        session_id: str,
        make: Callable[[], Slab],
        *,
        patience_s: float,
        late: Callable[[str], None],
    ) -> Slab | None:
        """Return a session's slab, which is `take`n then; None when it is not ready in time.

        `late` hears once that it is ready, or what is wrong. ExhaustedError when it cannot be made.
        """
        with self._lock:
            pending = self._slabs.get(session_id)
            if pending is None:
                pending = self._slabs[session_id] = _PendingSlab(late)
                args = (session_id, pending, make)
                threading.Thread(
                    target=self._run, args=args, name="rankdumpd-slab", daemon=True
                ).start()
            pending.late, pending.wanted = late, True
            pending.waiting += 1
        pending.done.wait(patience_s)
        with self._lock:
            pending.waiting -= 1
            if not pending.done.is_set() or self._slabs.get(session_id) is not pending:
                return None
            del self._slabs[session_id]
        if pending.fault:
            raise ExhaustedError(pending.fault)
        return pending.slab

    def drop(self, session_id: str) -> None:
        """Take a slab away that nobody wants any more, as soon as it is made."""
        with self._lock:
            pending = self._slabs.get(session_id)
            if pending is None:
                return
            pending.wanted = False
            if pending.done.is_set():
                del self._slabs[session_id]
        if pending.done.is_set() and pending.slab is not None:
            self._remove(session_id, pending.slab)

    def join(self, timeout_s: float) -> None:
        """Wait until none is being made any more, or no longer."""
        with self._lock:
            slabs = list(self._slabs.values())
        for pending in slabs:
            pending.done.wait(timeout_s)

    def _run(self, session_id: str, pending: _PendingSlab, make: Callable[[], Slab]) -> None:
        try:
            pending.slab = make()
        except ExhaustedError as error:
            pending.fault = str(error)
        except Exception as error:  # who waits must hear of it
            _log.exception("slab of session %s", session_id)
            pending.fault = f"internal error: {error}"
        with self._lock:
            pending.done.set()
            if not pending.wanted or (pending.fault and not pending.waiting):
                del self._slabs[session_id]
            if pending.wanted and not pending.waiting:
                # Under the lock: whoever asks next must not overtake it.
                pending.late(pending.fault)
        if not pending.wanted and pending.slab is not None:
            self._remove(session_id, pending.slab)
