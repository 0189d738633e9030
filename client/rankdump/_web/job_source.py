"""What the live page needs of a running job: its status, and a way to change what it dumps. The
command asks a daemon; a daemon can serve itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rankdump._core.job_control import ControlAction, ControlOrder
from rankdump._core.status import StatusView


@dataclass(frozen=True, slots=True)
class ControlOutcome:
    """What became of an order."""

    lines: tuple[str, ...]
    """Sentences for people, one for all ranks of which it is true."""
    is_complete: bool
    """Whether every rank does it, and where the others do."""


class JobSource(Protocol):
    """Source of the states of jobs, and receiver of orders to them; for all threads."""

    @property
    def address(self) -> str:
        """Whom it asks, for people."""
        ...

    def read_status(self) -> StatusView:
        """Return the status of all jobs; an error of rankdump when it is not known now."""
        ...

    def list_actions(self) -> tuple[ControlAction, ...]:
        """Return what may be asked, as far as that is known before; nothing without the role."""
        ...

    def send_control(self, order: ControlOrder) -> ControlOutcome:
        """Carry out an order, which takes seconds; the same order is carried out once.

        ForbiddenError without the role, RejectedError for a job that is not known or has ended.
        """
        ...
