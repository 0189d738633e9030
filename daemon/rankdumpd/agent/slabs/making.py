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
class _Making:
    """One slab, and what became of it."""

    late: Callable[[str], None]
    done: threading.Event = field(default_factory=threading.Event)
    slab: Slab | None = None
    fault: str = ""
    waiting: int = 0
    """How many wait for it now."""
    wanted: bool = True


class Makings:
    """One slab at most for each session; safe to use from several threads."""

    def __init__(self, remove: Callable[[str, Slab], None]) -> None:
        """`remove` takes away a session's slab that nobody wants any more."""
        self._remove = remove
        self._lock = threading.Lock()
        self._makings: dict[str, _Making] = {}

    def sessions(self) -> list[str]:
        """Return those whose slab is being made, or waits to be asked for."""
        with self._lock:
            return [who for who, making in self._makings.items() if making.wanted]

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
            making = self._makings.get(session_id)
            if making is None:
                making = self._makings[session_id] = _Making(late)
                args = (session_id, making, make)
                threading.Thread(
                    target=self._run, args=args, name="rankdumpd-slab", daemon=True
                ).start()
            making.late, making.wanted = late, True
            making.waiting += 1
        making.done.wait(patience_s)
        with self._lock:
            making.waiting -= 1
            if not making.done.is_set() or self._makings.get(session_id) is not making:
                return None
            del self._makings[session_id]
        if making.fault:
            raise ExhaustedError(making.fault)
        return making.slab

    def drop(self, session_id: str) -> None:
        """Take a slab away that nobody wants any more, as soon as it is made."""
        with self._lock:
            making = self._makings.get(session_id)
            if making is None:
                return
            making.wanted = False
            if making.done.is_set():
                del self._makings[session_id]
        if making.done.is_set() and making.slab is not None:
            self._remove(session_id, making.slab)

    def join(self, timeout_s: float) -> None:
        """Wait until none is being made any more, or no longer."""
        with self._lock:
            makings = list(self._makings.values())
        for making in makings:
            making.done.wait(timeout_s)

    def _run(self, session_id: str, making: _Making, make: Callable[[], Slab]) -> None:
        try:
            making.slab = make()
        except ExhaustedError as error:
            making.fault = str(error)
        except Exception as error:  # who waits must hear of it
            _log.exception("slab of session %s", session_id)
            making.fault = f"internal error: {error}"
        with self._lock:
            making.done.set()
            if not making.wanted or (making.fault and not making.waiting):
                del self._makings[session_id]
            if making.wanted and not making.waiting:
                # Under the lock: whoever asks next must not overtake it.
                making.late(making.fault)
        if not making.wanted and making.slab is not None:
            self._remove(session_id, making.slab)
