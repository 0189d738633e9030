"""What a configuration may ask of the file system, as values: the parsers are pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

_SHELL_WORD = re.compile(r"\$\w+|\$\{\w+\}|(?:^|(?<=/))~\w*")


def unreplaced(path: str) -> str:
    """Return the end of a sentence on what a shell would have replaced; empty without any.

    >>> unreplaced("$HOME/dump")
    ': nothing replaces $HOME here'
    """
    word = _SHELL_WORD.search(path)
    return f": nothing replaces {word[0]} here" if word else ""


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
            return f"a folder that exists{unreplaced(self.absolute)}"
        if not self.directory:
            return "a folder, which this is not"
        return "" if self.accessible else "a folder that this process may read and write"


Probe = Callable[[str], PathFacts]
"""Looks at a path, relative to where the process stands."""
