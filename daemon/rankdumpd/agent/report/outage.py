"""Since when and why a coordinator takes nothing, and what that means for a stop. Pure."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

SAID_AFTER_S = 2.0
"""A coordinator that is started together with its agents may be away for so long."""
LAST_TRY_S = 2.0
"""What a stop gives a coordinator that does not answer, to take what is left after all."""


@dataclass(frozen=True, slots=True)
class Outage:
    """That nothing is delivered."""

    since_s: float
    """Of the first attempt that failed, in seconds since the epoch."""
    reason: str
    refused: bool
    """Whether the coordinator answers and wants nothing of this agent, or files are at fault."""

    def worth_saying(self, now_s: float) -> bool:
        """Return whether people should know of it by now."""
        return self.refused or now_s - self.since_s >= SAID_AFTER_S


def undelivered(address: str, outage: Outage, *, items: int, events: int) -> str:
    """Say what is not delivered, since when and why."""
    since = datetime.datetime.fromtimestamp(outage.since_s).strftime("%Y-%m-%d %H:%M:%S")
    waits = f"messages waiting: {items:,}, with events: {events:,}"
    wait = waits if items else "nothing waits for it yet"
    verb = "refuses this agent" if outage.refused else "cannot be reached"
    return f"coordinator {address} {verb} since {since}: {outage.reason}; {wait}"


def hopeless(outage: Outage | None, *, now_s: float, tried: bool) -> bool:
    """Return whether to wait on for a coordinator is of no use; `tried` since the wait began."""
    return outage is not None and tried and outage.worth_saying(now_s)
