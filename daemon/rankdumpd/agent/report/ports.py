"""What the reporter needs of the ledger, and the times it looks at."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rankdump.contract.status import SessionStatus
from rankdumpd.agent.report.clock import Instant
from rankdumpd.agent.values import LogItem


class Log(Protocol):
    """Numbered items, as far as the reporter knows them."""

    @property
    def newest(self) -> int:
        """Number of the last item that this process entered."""
        ...

    def enter_session(self, status: SessionStatus, root: str) -> None:
        """Enter how a session stands and where its tree is."""
        ...

    def acknowledged(self, number: int) -> None:
        """Forget the items up to a number."""
        ...

    def begin_after(self, number: int) -> int:
        """See to it that no item has a number that the coordinator knows as another's; return how
        many got another one.
        """
        ...

    def acknowledged_to(self) -> int:
        """Return up to which number items were ever forgotten like that."""
        ...

    def give_up(self, first: int, last: int) -> None:
        """Forget items that cannot be told, and count them."""
        ...

    def items(self, after: int) -> list[LogItem]:
        """Return the next items behind a number, some at a time."""
        ...

    def waiting(self, after: int) -> tuple[int, int]:
        """Return how many items stand behind a number, and how many events they hold."""
        ...

    def last(self) -> int:
        """Return the number of the last item; 0 when none stands there."""
        ...

    def lost(self) -> tuple[int, int]:
        """Return how many events and how many other items were ever given up."""
        ...

    def agent_id(self) -> str:
        """Return the name under which the items are numbered."""
        ...


def _now() -> Instant:
    # Side by side: what passes between the two readings counts as a jump of the clock.
    return Instant(time.time_ns() // 1000, time.monotonic_ns() // 1000)


@dataclass(frozen=True, slots=True)
class Times:
    """How long the reporter waits for what, and its clocks."""

    heartbeat_s: float = 1.0
    first_retry_s: float = 0.1
    last_retry_s: float = 5.0
    answer_s: float = 60.0
    """A coordinator that answers nothing for so long is given up."""
    knock_s: float = 5.0
    """How long a coordinator that has nothing to take may need to say that it is there."""
    clock_s: float = 0.5
    """An answer that takes longer would say nothing about clocks."""
    now: Callable[[], Instant] = _now
