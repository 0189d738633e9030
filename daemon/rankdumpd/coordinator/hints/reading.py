"""One limit as it was read, and how the texts of variables are read. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from rankdump.contract.timeouts import TimeoutLimit

SECOND_US = 1_000_000
UNLIMITED_S = 2147483647
"""The largest limit that anything here takes."""
_SHOWN = 40
_YES = ("1", "y", "yes", "t", "true")
_NO = ("0", "n", "no", "f", "false")


class Covers(Enum):
    """Which waits a limit strikes."""

    WAITS = "waits"
    FIRST = "first"
    """Only in the first collective of a group, in which its members connect."""
    NOTHING = "nothing"
    """It is listed because it is in force, but strikes something else."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit, and what has to be known to choose among several."""

    limit: TimeoutLimit
    covers: Covers = Covers.WAITS
    derived: bool = False
    """It follows from another limit when that one is set."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A number of seconds, and where it was read."""

    seconds: float
    source: str


def seconds_of(
    variables: Mapping[str, str],
    name: str,
    default: float,
    *,
    owner: str,
    legal: tuple[float, float],
    whole: bool = True,
) -> Reading:
    """Return what a variable says; its default, and why, where it says nothing legal."""
    usual = f"default of {owner}"
    text = variables.get(name, "").strip()
    if not text:
        return Reading(default, usual)
    seconds = _number(text, whole)
    if seconds is None:
        return Reading(default, f"{usual}: {text[:_SHOWN]!r} in the environment cannot be read")
    low, high = legal
    if not low <= seconds <= high:
        allowed = f"{low:g} to {high:.0f}"
        shown = f"{text[:_SHOWN]} in the environment is not allowed, only {allowed}"
        return Reading(default, f"{usual}: {shown}")
    return Reading(seconds, "environment")


def declared(limits: Mapping[str, float], name: str) -> float | None:
    """Return the seconds a script declared; None where that is no number of seconds."""
    seconds = limits.get(name, math.nan)
    return min(seconds, UNLIMITED_S) if seconds >= 0 else None


def count_of(variables: Mapping[str, str], name: str, default: int) -> int:
    """Return the whole number a variable says, or the default."""
    number = _number(variables.get(name, "").strip(), whole=True)
    return default if number is None else int(number)


def is_on(variables: Mapping[str, str], name: str, *, default: bool) -> bool:
    """Return whether a variable switches something on, in torch's words for that."""
    text = variables.get(name, "").strip().lower()
    if text in _YES:
        return True
    return False if text in _NO else default


def _number(text: str, whole: bool) -> float | None:
    try:
        number = int(text) if whole else float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
