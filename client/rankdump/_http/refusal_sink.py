"""Where a server notes the requests that it refused."""

from __future__ import annotations

from typing import Protocol

from rankdump._core.caller_roles import CallerIdentity


class RefusalSink(Protocol):
    """Notes refused requests; called from several threads."""

    def count(self, reason: str) -> None:
        """Note a refusal of which only the reason is known, without waiting."""
        ...

    def add(self, reason: str, caller: CallerIdentity, request: str, why: str) -> None:
        """Note a refused request with its first line; may wait for a disk."""
        ...
