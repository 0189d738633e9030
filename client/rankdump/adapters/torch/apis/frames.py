"""What is open in a thread: modules whose calls have begun, and functions that run."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from rankdump.adapters.torch.apis.modules import Role
from rankdump.adapters.torch.apis.recording import Calling
from rankdump.adapters.torch.raising import Fault
from rankdump.adapters.torch.scopes import Operator


@dataclass(slots=True, eq=False)
class Frame:
    """A module's call that has begun."""

    operator: Operator
    role: Role
    handled: int
    """The error that the script was handling already."""
    took_mode: bool = False
    """The mode is off while it runs."""
    calling: Calling | None = None


class Thread(threading.local):
    """What is open in this thread."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.generation = 0
        self.met = False
        """Whether the mode was put into this thread before."""
        self.running = 0
        """Functions that run, for which torch took the mode off."""
        self.paused = False
        self.fault: Fault | None = None
        """The last error that came out of a module."""
