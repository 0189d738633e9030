"""Which frames of a session are accounted for: the arithmetic of acknowledgements. Pure."""

from __future__ import annotations

from collections.abc import Iterable


class Progress:
    """A watermark, and the numbers beyond it that came early."""

    def __init__(self, watermark: int = 0, beyond: Iterable[int] = ()) -> None:
        self._watermark = watermark
        self._beyond = {number for number in beyond if number > watermark}
        self._rise()

    @property
    def watermark(self) -> int:
        """Everything up to this number is accounted for."""
        return self._watermark

    def __contains__(self, sequence: int) -> bool:
        return sequence <= self._watermark or sequence in self._beyond

    def add(self, sequences: Iterable[int]) -> None:
        """Account for these numbers, in any order, again or not."""
        self._beyond.update(number for number in sequences if number > self._watermark)
        self._rise()

    def _rise(self) -> None:
        while self._watermark + 1 in self._beyond:
            self._watermark += 1
            self._beyond.remove(self._watermark)
