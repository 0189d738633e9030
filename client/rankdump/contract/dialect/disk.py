"""What a configuration may ask of the file system, as values: the parsers are pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PathFacts:
    """What there is at a path."""

    absolute: str
    """The path from `/` on."""
    exists: bool = False
    directory: bool = False
    accessible: bool = False
    """This process may read and write there."""

    @property
    def fault(self) -> str:
        """Say what keeps it from being a folder to write to; empty when nothing does."""
        if not self.exists:
            return "a folder that exists"
        if not self.directory:
            return "a folder, which this is not"
        return "" if self.accessible else "a folder that this process may read and write"


Probe = Callable[[str], PathFacts]
"""Looks at a path, relative to where the process stands."""
