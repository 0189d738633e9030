"""Where a rank stands: which iteration runs, and whether it is dumped. Pure, one rank's state.

`dump_start` and `dump_stop` replace the plan's iterations from their first use on, as MindSpore's
dynamic mode does (mindspore-dump.md 1.12).
"""

from __future__ import annotations

from rankdump.contract.plan import DumpPlan
from rankdump.contract.selection import device_verdict, iteration_verdict


class Course:
    """The iterations of one rank; changed on the training thread, read from any."""

    def __init__(self, plan: DumpPlan, device: int) -> None:
        self._plan = plan
        self._here = device_verdict(plan, device).accepted
        self._switch: bool | None = None
        self._described = False
        self._touched = False  # armed at some time in the running iteration
        self.iteration = plan.selection.initial_iteration
        """The iteration that runs now."""
        self.armed = False
        """Whether tensors of this iteration are kept now."""
        self.active = False
        """Whether anything happened in this iteration."""
        self.ever_armed = False
        """Whether any iteration was armed."""
        self.seen = 0
        """Iterations that ran."""
        self.armed_seen = 0
        """Iterations that ran and were dumped, at least in part."""
        self.retired_in: int | None = None
        """The last iteration to be dumped, once the plan has what it asked for."""

    @property
    def switched(self) -> bool:
        """Whether the script itself says when to dump."""
        return self._switch is not None

    @property
    def describing(self) -> bool:
        """Whether operators are to be described now."""
        return self.armed and not self._described

    def begin(self, iteration: int) -> None:
        """Make this the running iteration."""
        self.iteration = iteration
        self.active = self._touched = False
        self._arm()

    def end(self, *, ran: bool) -> bool:
        """Return whether the iteration that is over counts as dumped; it does not if none ran."""
        if not (ran or self.active):
            return False
        self.seen += 1
        self.armed_seen += self._touched
        self._described = self._described or self._touched
        return self._touched

    def switch(self, on: bool) -> None:
        """Dump from now on, or no longer, whatever iterations the plan names."""
        self._switch = on
        self._arm()

    def describe_again(self) -> None:
        """Let operators be described in the next armed iteration too: a model was added."""
        self._described = False

    def retire(self) -> None:
        """Dump no iteration after this one: the plan has what it asked for."""
        self.retired_in = self.iteration

    def leave(self) -> None:
        """Dump nothing any more: there is nowhere to send it."""
        self._here = self.armed = False

    def _arm(self) -> None:
        wanted = self._switch
        if wanted is None:
            wanted = iteration_verdict(self._plan, self.iteration).accepted
        over = self.retired_in is not None and self.retired_in != self.iteration
        self.armed = self._here and wanted and not over
        self._touched = self._touched or self.armed
        self.ever_armed = self.ever_armed or self.armed
