"""What a session tells of its progress, and to whom."""

from __future__ import annotations

from typing import Protocol


class Listener(Protocol):
    """The stream of a session, as far as its session knows it."""

    @property
    def at_rest(self) -> bool:
        """Whether all that came was taken in, to the end of a record."""
        ...

    def acknowledge(self, sequence: int) -> None:
        """Tell the rank that everything up to this number is accounted for."""
        ...

    def warn(self, text: str) -> None:
        """Let the rank say this in its log."""
        ...

    def offer_slab(self) -> None:
        """Tell the rank that its shared memory is there now."""
        ...

    def end(self, reason: str) -> None:
        """Break the stream off; the rank may come back."""
        ...


class Ring(Protocol):
    """The slab of a session, as far as its session knows it."""

    def acknowledge(self, sequence: int) -> None:
        """Release what is safe now that everything up to this number is."""
        ...

    def abandon(self, reason: str) -> None:
        """Let the rank go on without it, and send again what is not acknowledged."""
        ...
