"""The number of the step that runs now, told by calls of the model and its optimizers' steps.

A step ends with an optimizer's: it is over when the model is called again. Several optimizers of
one step count once, and so do several forward passes before it (accumulation, closures). A call of
another manner, such as an evaluation, or one that no gradient can come of, is a step of its own; so
is every call where there is no optimizer. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock


class Steps:
    """Counts the steps of one model from 0; safe to use from several threads."""

    def __init__(self) -> None:
        self.number = 0
        """The step that runs now."""
        self._manner = ""
        """How the model was called in it; empty before the first call."""
        self._trained = False
        self._optimized = False
        self._told = False
        self._lock = Lock()

    @property
    def upcoming(self) -> int:
        """The step that what comes next belongs to, as far as it can be known."""
        return self.number + self._optimized

    def called(self, manner: str, *, trains: bool, optimized: Callable[[], bool]) -> bool:
        """Take a call of the model; return whether a step begins with it.

        `optimized` says whether there is an optimizer whose step may still come.
        """
        with self._lock:
            if self._told:
                return False
            goes_on = not self._manner or (
                not self._optimized
                and manner == self._manner
                and self._trained
                and trains
                and optimized()
            )
            self._manner, self._trained, self._optimized = manner, trains, False
            if not goes_on:
                self.number += 1
            return not goes_on

    def stepped(self) -> None:
        """Take the end of an optimizer's step."""
        with self._lock:
            # Before any call it is none of this model's steps.
            self._optimized = self._optimized or bool(self._manner)

    def tell(self, number: int | None = None) -> int:
        """Take the script's own word, by default for the next step; nothing is counted any more."""
        with self._lock:
            following = self.number + 1 if self._told or self._manner else self.number
            self._told, self._optimized = True, False
            self.number = following if number is None else number
            return self.number
