"""What one rank knows of how long communication may wait; said again, complete, when it grew."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from numbers import Real
from typing import cast

from rankdump.contract.timeouts import GroupTimeout, Timeouts

MAX_NAME = 64
MAX_SECONDS = 2**31


class Limits:
    """The limits of one session; safe to use from several threads."""

    def __init__(
        self,
        variables: Mapping[str, str],
        declare: Callable[[Timeouts], None],
        warn: Callable[[str], None],
    ) -> None:
        """`variables` are those of the environment that set a limit."""
        self._variables = dict(variables)
        self._declare = declare
        self._warn = warn
        self._groups: dict[tuple[str, str], GroupTimeout] = {}
        self._limits: dict[str, float] = {}
        self._lock = threading.Lock()

    def start(self) -> None:
        """Say what the environment says, if it says anything."""
        if self._variables:
            self._say()

    def group(self, timeout: GroupTimeout) -> None:
        """Take what a process group in use was made with."""
        place = (timeout.group, timeout.backend)
        if self._groups.get(place) != timeout:
            with self._lock:
                self._groups[place] = timeout
                self._say()

    def limit(self, name: str, seconds: float) -> None:
        """Take a limit that no variable says; one that cannot be is a warning."""
        fault = _fault_of(name, seconds)
        if fault:
            self._warn(f"limit: {fault}")
            return
        with self._lock:
            if self._limits.get(name) != seconds:
                self._limits[name] = float(seconds)
                self._say()

    def _say(self) -> None:
        groups = tuple(self._groups.values())
        self._declare(Timeouts(dict(self._variables), groups, dict(self._limits)))


def _fault_of(name: object, seconds: object) -> str:
    """Return what is wrong with a limit; empty when nothing is."""
    if not (isinstance(name, str) and name.isascii() and name.isidentifier()):
        return f"name {_shown(name)}; allowed: letters, digits and _"
    if len(name) > MAX_NAME:
        return f"name of {len(name)} characters; allowed: up to {MAX_NAME}"
    number = cast("float", seconds) if isinstance(seconds, Real) else math.nan
    if isinstance(seconds, bool) or not 0 <= number < MAX_SECONDS:
        return f"{name} of {_shown(seconds)}; allowed: seconds from 0 (never) to {MAX_SECONDS - 1}"
    return ""


def _shown(value: object) -> str:
    try:
        return repr(value)[:MAX_NAME]
    except Exception:  # the script's own object decides
        return type(value).__name__
