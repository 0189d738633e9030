"""Log messages of one session: each warning once, each change of the connection, and each message
that concerns all ranks of a job on a host only from one of these ranks.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections.abc import Iterable, Mapping

from rankdump._core.drop_reasons import explain_drop
from rankdump._core.log_once import LogOnce
from rankdump._core.session_protocol import SessionRequest
from rankdump._transport.send_buffer import LinkState

_MAX_CLAIMS = 64
"""Maximum number of claims, each of which uses a descriptor; later messages are logged
without one.
"""


class HostNotices:
    """Claims on messages until `close`: only one of a job's ranks on a host logs a claimed message.

    A claim is the name of an abstract Unix socket (unix(7)), which only one process of a host or
    container can bind, and which is released when that process ends.
    """

    def __init__(self, job_id: str, *, alone: bool) -> None:
        """`alone` says that the rank is the only one of its job, so it gets every claim."""
        self._job_id, self._alone = job_id, alone
        self._claims: list[int] = []

    def claim(self, text: str) -> bool:
        """Claim a text for this rank to log; return False if another rank of the host has it."""
        if self._alone or len(self._claims) >= _MAX_CLAIMS:
            return True
        key = f"{os.getuid()}\0{self._job_id}\0{text}".encode("utf-8", "surrogateescape")
        name = hashlib.blake2b(key, digest_size=16).hexdigest()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as claim:
            try:
                claim.bind(f"\0rankdump-notice-{name}")
            except OSError:
                return False
            self._claims.append(claim.detach())
        return True

    def close(self) -> None:
        """Release all claims."""
        while self._claims:
            os.close(self._claims.pop())


_logger = logging.getLogger("rankdump")

# Limit for a script that makes a new fault in every step.
_MAX_WARNINGS = 1000


class SessionLogger:
    """Logger of one session; safe to use from several threads.

    A message that concerns all ranks of a host is logged by one of them; any other message names
    its rank.
    """

    def __init__(
        self, request: SessionRequest, address: str, buffer_bytes: int, *, missing: str = ""
    ) -> None:
        """`missing` is the reason why there is no agent, if that is known from the start."""
        self._address = address
        self._buffer_bytes = buffer_bytes
        self._missing = missing
        alone = request.world_size == 1
        self._rank = "" if alone else f"rank {request.rank}: "
        self._host = HostNotices(request.job_id, alone=alone)
        self._not_open = ""
        self._is_absent = False
        self._times_away = 0
        self._away = False
        self._once = LogOnce(_logger, max_keys=_MAX_WARNINGS + 1)

    def warn_once(self, message: str, *, about: str = "") -> None:
        """Log a warning unless one with the same text or subject was logged. The last warning
        before the limit says that further ones are not logged.
        """
        subject = about or message
        if not self._once.is_new(subject):
            return
        if self._once.is_full:
            message = f"{_MAX_WARNINGS} different warnings were logged; further ones are suppressed"
        if self._host.claim(subject):
            _logger.warning("rankdump: %s", message)

    def warn_lost_tensor(self, reason: str, op_name: str) -> None:
        """Log the first loss for each reason."""
        cause, remedy = explain_drop(reason)
        message = f"tensors are dropped ({reason}), the first of {op_name}: {cause}; {remedy}"
        self.warn_once(message, about=f"lost {reason}")

    def log_link_change(self, link: LinkState, reason: str, *, closing: bool) -> None:
        """Log a change of the connection's state."""
        if link in (LinkState.ABSENT, LinkState.UNRESPONSIVE):
            absent = f"no agent at {self._address} ({reason})"
            if link is LinkState.UNRESPONSIVE:
                absent = f"the agent at {self._address} does not answer ({reason})"
            self._not_open, self._is_absent = "", True
            self.warn_once(
                f"{self._missing or absent}: training "
                f"continues; up to {self._buffer_bytes >> 20} MiB of tensors wait for an agent, "
                f"further ones are dropped and counted",
                about="absent",
            )
        elif link in (LinkState.OPENING, LinkState.WAITING):
            self._not_open = f"the agent at {self._address} has not opened the session ({reason})"
            self.warn_once(
                f"{self._rank}{self._not_open}: training continues; up to "
                f"{self._buffer_bytes >> 20} MiB of tensors wait for it, further ones are dropped "
                f"and counted",
                about="opening",
            )
        elif link is LinkState.REJECTED:
            self.warn_once(f"{self._rank}the agent at {self._address} rejected this rank: {reason}")
        elif link is LinkState.AWAY and not self._away and not closing:
            self._away = True
            self._times_away += 1
            self.warn_once(
                f"lost the agent at {self._address}: {reason}", about=f"away {self._times_away}"
            )
        elif link is LinkState.UP:
            self._missing = ""
            if self._not_open:
                self._not_open = ""
                self.warn_once(f"{self._rank}the agent at {self._address} has opened the session")
            if self._is_absent:
                self._is_absent = False
                self.warn_once(f"the agent at {self._address} answers now")
            if self._away:
                self._away = False
                self.warn_once(
                    f"the agent at {self._address} is back", about=f"back {self._times_away}"
                )

    def warn_no_shared_memory(self, reason: str) -> None:
        """Log that shared memory was requested but the agent offers none."""
        self.warn_once(
            f"tensors are sent over the stream, not through shared memory: {reason}",
            about="no slab",
        )

    def warn_unwritten_tensors(self, count: int, link: LinkState) -> None:
        """Log how many tensors remain in shared memory at the end, whether the agent
        runs or not.
        """
        if count and link is LinkState.UP:
            self.warn_once(
                f"{self._rank}the agent at {self._address} has yet to write {count} tensors"
            )
        elif count and link is LinkState.REJECTED:
            self.warn_once(
                f"{self._rank}{count} tensors remain in shared memory: the agent at "
                f"{self._address} writes them if it knows the session, or logs that they are lost"
            )
        elif count:
            self.warn_once(
                f"{self._rank}the agent at {self._address} has not come back: {count} tensors "
                f"remain in its shared memory and are written when it runs again"
            )

    def log_summary(self, warnings: Iterable[str], remarks: Iterable[str]) -> None:
        """Log the summary of the run."""
        for message in warnings:
            self.warn_once(message)
        for message in remarks:
            _logger.info("rankdump: %s", message)

    def warn_lost_stacks(self, calls: int) -> None:
        """Log how many calls are missing in the file of call stacks because there was no space."""
        if calls:
            self.warn_once(
                f"{self._rank}call stacks of {calls} calls were dropped: the send buffer was full"
            )

    def warn_losses(self, tensors: Mapping[str, int], declarations: int) -> None:
        """Log how many tensors, by reason, and how many declarations never reached the tree."""
        if declarations:
            self.warn_once(
                f"{self._rank}{declarations} batches of events, graphs and ends of iterations were "
                f"not sent"
            )
        if tensors:
            listed = ", ".join(f"{count} {reason}" for reason, count in tensors.items())
            cause = self._missing or self._not_open
            why = f"; {cause}" if cause else ""
            self.warn_once(
                f"{self._rank}{sum(tensors.values())} tensors were not dumped: {listed}{why}"
            )

    def close(self) -> None:
        """Release all claims, so that other ranks of this host may log the same messages."""
        self._host.close()
