"""What a session says in the log of the job: every warning once, news of the agent as it comes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping

from rankdump.contract.exchange import SessionRequest
from rankdump.pipeline.host_notices import HostNotices
from rankdump.ship import Link

logger = logging.getLogger("rankdump")

# A script that is wrong in a new way at every step must not fill its log.
_MAX_WARNINGS = 1000


class Voice:
    """Speaks for one session; safe to use from several threads.

    What holds for all ranks of a host one of them says; what is a rank's own names the rank.
    """

    def __init__(
        self, request: SessionRequest, address: str, buffer_bytes: int, *, missing: str = ""
    ) -> None:
        """`missing` says why there is no agent, where that is known from the start."""
        self._address = address
        self._buffer_bytes = buffer_bytes
        self._missing = missing
        alone = request.world_size == 1
        self._rank = "" if alone else f"rank {request.rank}: "
        self._host = HostNotices(request.job_id, alone=alone)
        self._not_open = ""
        self._times_away = 0
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
            if not self._host.claim(about or message):
                return
        logger.warning("rankdump: %s", message)

    def lost(self, reason: str, op_name: str) -> None:
        """Log the first tensor that was lost for a reason."""
        message = f"tensors are dropped for {reason}, the first at {op_name}"
        self.once(message, about=f"lost {reason}")

    def link_changed(self, link: Link, reason: str, *, closing: bool) -> None:
        """Log how the connection stands, where that is news."""
        if link is Link.ABSENT:
            self._not_open = ""
            self.once(
                f"{self._missing or f'no agent at {self._address} ({reason})'}: training goes on, "
                f"up to {self._buffer_bytes >> 20} MiB of tensors wait for one, the rest is "
                f"dropped and counted",
                about="absent",
            )
        elif link is Link.OPENING:
            self._not_open = f"the agent at {self._address} has not opened the session ({reason})"
            self.once(
                f"{self._rank}{self._not_open}: training goes on, up to "
                f"{self._buffer_bytes >> 20} MiB of tensors wait for it, the rest is dropped and "
                f"counted",
                about="opening",
            )
        elif link is Link.REFUSED:
            self.once(f"{self._rank}the agent at {self._address} refused this rank: {reason}")
        elif link is Link.AWAY and not self._away and not closing:
            self._away = True
            self._times_away += 1
            self.once(
                f"lost the agent at {self._address}: {reason}", about=f"away {self._times_away}"
            )
        elif link is Link.UP:
            self._missing = ""
            if self._not_open:
                self._not_open = ""
                self.once(f"{self._rank}the agent at {self._address} has opened the session")
            if self._away:
                self._away = False
                self.once(f"the agent at {self._address} is back", about=f"back {self._times_away}")

    def no_slab(self, reason: str) -> None:
        """Log that the agent's shared memory is not used, though it was asked for."""
        self.once(f"tensors travel on the stream, in pieces: {reason}", about="no slab")

    def left_in_slab(self, count: int, link: Link) -> None:
        """Log what the agent has yet to take out of shared memory, whether it is there or not."""
        if count and link is Link.UP:
            self.once(
                f"{self._rank}{count} tensors are left to the agent at {self._address} to write"
            )
        elif count:
            self.once(
                f"{self._rank}the agent at {self._address} has not come back: {count} tensors "
                f"stand in its shared memory, and are in the tree only once it runs again"
            )

    def goodbye(self, warnings: Iterable[str], remarks: Iterable[str]) -> None:
        """Log what the whole run amounted to."""
        for message in warnings:
            self.once(message)
        for message in remarks:
            logger.info("rankdump: %s", message)

    def stacks_lost(self, calls: int) -> None:
        """Log of how many calls the stack file says nothing, for want of room."""
        if calls:
            self.once(
                f"{self._rank}where {calls} calls came from was not sent: too much waited for the "
                f"agent"
            )

    def losses(self, tensors: Mapping[str, int], declarations: int) -> None:
        """Log what never reached the tree; the tensors by reason."""
        if declarations:
            self.once(
                f"{self._rank}{declarations} batches of events, graphs and ends of iterations were "
                f"not sent"
            )
        if tensors:
            listed = ", ".join(f"{count} {reason}" for reason, count in tensors.items())
            cause = self._missing or self._not_open
            why = f"; {cause}" if cause else ""
            self.once(f"{self._rank}{sum(tensors.values())} tensors were not dumped: {listed}{why}")

    def close(self) -> None:
        """Let other ranks of this host say what this one has said."""
        self._host.close()
