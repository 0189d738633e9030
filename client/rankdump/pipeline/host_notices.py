"""Says a thing once for all ranks of a job on a host."""

from __future__ import annotations

import hashlib
import os
import socket

_MOST_CLAIMS = 64
"""Each is a descriptor; whoever has more to say says it without asking."""


class HostNotices:
    """Claims what is said, until `close`: of all ranks of a job on a host one gets each claim.

    A claim is the name of an abstract Unix socket (unix(7)), which at most one process of a host or
    container binds, and which ends with its process.
    """

    def __init__(self, job_id: str, *, alone: bool) -> None:
        """A rank that is `alone` in its job gets every claim."""
        self._job_id, self._alone = job_id, alone
        self._claims: list[int] = []

    def claim(self, text: str) -> bool:
        """Return whether it is this rank that says a text."""
        if self._alone or len(self._claims) >= _MOST_CLAIMS:
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
        """Give all claims up."""
        while self._claims:
            os.close(self._claims.pop())
