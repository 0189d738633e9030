"""What a session says in the log of the job: every warning once, news of the agent as it comes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping

from rankdump.ship import Link

logger = logging.getLogger("rankdump")

# A script that is wrong in a new way at every step must not fill its log.
_MAX_WARNINGS = 1000


class Voice:
    """Speaks for one session; safe to use from several threads."""

    def __init__(self, address: str, buffer_bytes: int) -> None:
        self._address = address
        self._buffer_bytes = buffer_bytes
        self._away = False
        self._said: set[str] = set()
        self._lock = threading.Lock()

    def once(self, message: str, *, about: str = "") -> None:
        """Log a warning the first time it is said, or the first one about a thing."""
        with self._lock:
            if (about or message) in self._said or len(self._said) > _MAX_WARNINGS:
                return
            self._said.add(about or message)
            if len(self._said) > _MAX_WARNINGS:
                message = f"{_MAX_WARNINGS} different warnings were given: no more are"
        logger.warning("rankdump: %s", message)

    def lost(self, reason: str, op_name: str) -> None:
        """Log the first tensor that was lost for a reason."""
        message = f"tensors are dropped for {reason}, the first at {op_name}"
        self.once(message, about=f"lost {reason}")

    def link_changed(self, link: Link, reason: str, *, closing: bool) -> None:
        """Log how the connection stands, where that is news."""
        if link is Link.ABSENT:
            self.once(
                f"no agent at {self._address} ({reason}): training goes on, up to "
                f"{self._buffer_bytes >> 20} MiB of tensors wait for one, the rest is dropped "
                f"and counted",
                about="absent",
            )
        elif link is Link.REFUSED:
            self.once(f"the agent at {self._address} refused this rank: {reason}")
        elif link is Link.AWAY and not self._away and not closing:
            self._away = True
            logger.warning("rankdump: lost the agent at %s: %s", self._address, reason)
        elif link is Link.UP and self._away:
            self._away = False
            logger.warning("rankdump: the agent at %s is back", self._address)

    def no_slab(self, reason: str) -> None:
        """Log that the agent's shared memory is not used, though it was asked for."""
        self.once(f"tensors travel on the stream, in pieces: {reason}", about="no slab")

    def left_in_slab(self, count: int) -> None:
        """Log what the agent has yet to take out of shared memory."""
        if count:
            self.once(f"{count} tensors are left to the agent at {self._address} to write")

    def goodbye(self, warnings: Iterable[str], remarks: Iterable[str]) -> None:
        """Log what the whole run amounted to."""
        for message in warnings:
            self.once(message)
        for message in remarks:
            logger.info("rankdump: %s", message)

    def stacks_lost(self, calls: int) -> None:
        """Log of how many calls the stack file says nothing, for want of room."""
        if calls:
            self.once(f"where {calls} calls came from was not sent: too much waited for the agent")

    def losses(self, tensors: Mapping[str, int], declarations: int) -> None:
        """Log what never reached the tree; the tensors by reason."""
        if declarations:
            self.once(
                f"{declarations} batches of events, graphs and ends of iterations were not sent"
            )
        if tensors:
            listed = ", ".join(f"{count} {reason}" for reason, count in tensors.items())
            self.once(f"{sum(tensors.values())} tensors were not dumped: {listed}")
