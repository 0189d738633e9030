"""How an agent's memory is shared out: its queue, its slabs, its sessions. Pure."""

from __future__ import annotations

from dataclasses import dataclass

SESSION_BYTES = 8 << 20
"""What a session may hold besides its slab: one message of the largest size."""
_LEAST_SESSIONS = 16


@dataclass(frozen=True, slots=True)
class Cap:
    """A limit that queue, slabs and sessions stay under together."""

    total_bytes: int
    queue_bytes: int
    """Of the queue, or of the largest record, which passes it alone."""
    record_bytes: int
    """Of the largest record that fits."""

    def session_fault(self, *, slab_bytes: int, sessions: int) -> str:
        """Return why one more session cannot be let in beside these; empty when it can."""
        return self._fault("a session", SESSION_BYTES, slab_bytes, sessions)

    def slab_fault(self, wanted_bytes: int, *, slab_bytes: int, sessions: int) -> str:
        """Return why there is no room for another slab beside these; empty when there is."""
        return self._fault("a slab", wanted_bytes, slab_bytes, sessions)

    def _fault(self, what: str, wanted_bytes: int, slab_bytes: int, sessions: int) -> str:
        used_bytes = self.queue_bytes + slab_bytes + sessions * SESSION_BYTES
        if used_bytes + wanted_bytes <= self.total_bytes:
            return ""
        return (
            f"{what} needs {wanted_bytes} bytes, and {max(0, self.total_bytes - used_bytes)} of "
            f"the agent's {self.total_bytes} (agent.memory_bytes) are left: "
            f"{self.queue_bytes} for its queue, {slab_bytes} in slabs, {sessions} sessions"
        )


def share_out(
    memory_bytes: int, *, machine_bytes: int, queue_bytes: int, max_record_bytes: int
) -> Cap:
    """Return the shares of a limit; without one, of half the machine's memory.

    That half grows to what a few sessions need on a small machine.
    """
    total_bytes = memory_bytes or max(
        machine_bytes // 2, queue_bytes + _LEAST_SESSIONS * SESSION_BYTES
    )
    record_bytes = min(max_record_bytes, max(queue_bytes, total_bytes // 2))
    return Cap(total_bytes, max(queue_bytes, record_bytes), record_bytes)
