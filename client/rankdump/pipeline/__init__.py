"""The rooms of a training process, wired: an observation goes filter -> stage -> ship.

Composition root. `recorder` answers to adapters; nothing here raises into the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rankdump.accounts import Accounts, Stalls
from rankdump.aliases import Aliases
from rankdump.contract.exchange import RecordHead, SessionEnd, SessionRequest
from rankdump.contract.plan import DumpPlan
from rankdump.filter import Filter
from rankdump.pipeline.callers import Callers
from rankdump.pipeline.children import call_in_children
from rankdump.pipeline.choices import (
    batch_rows,
    goes_straight,
    heads_of,
    keeps_stacks,
    measure_of,
    patience_s,
    profile_of,
    rows_bytes,
    wants_slab,
)
from rankdump.pipeline.course import Course
from rankdump.pipeline.declaring import Declaring
from rankdump.pipeline.farewell import farewell_of, run_of
from rankdump.pipeline.limits import Limits
from rankdump.pipeline.outlet import Outlet
from rankdump.pipeline.ranges import Ranges
from rankdump.pipeline.reading import COPY_FAILED, Reading
from rankdump.pipeline.recording import Recording
from rankdump.pipeline.triggers import Trigger, trigger_of
from rankdump.pipeline.voice import Voice
from rankdump.ship import Link, Ship
from rankdump.sketch import Sketch
from rankdump.stage import Budget, Stage
from rankdump.trace import Trace
from rankdump.values import Placing, TensorSource
from rankdump.wire.channel import Credentials

NOT_TAKEN = "not_taken_by_agent"
FIRST_ANSWER_S = 5.0
"""Longest a job waits at its start for an agent that neither answers nor refuses."""


class Pipeline:
    """One rank's way from operator to agent: iterations begin and end here."""

    def __init__(
        self,
        plan: DumpPlan,
        request: SessionRequest,
        address: str,
        variables: Mapping[str, str] | None = None,
        credentials: Credentials | None = None,
        *,
        missing: str = "",
    ) -> None:
        """`variables` are those of the environment that set a limit to communication; `missing`
        says why no agent is to be expected.
        """
        self._plan, self._device = plan, request.device
        self._quiet = plan.selection.trigger == "exception"
        self._in_child = False
        self._course = Course(plan, request.device)
        self._voice = Voice(request, address, plan.delivery.buffer_bytes, missing=missing)
        self._accounts, self._stalls = Accounts(), Stalls()
        self._heads = heads_of(plan, request.rank)
        self._ranges = Ranges(plan.selection, self._heads.model, self._voice.once)
        self._filter = Filter(plan, self._heads.model, self._ranges.holds)
        # One rank's events alone would read as a job in which all others are missing.
        self._trace = Trace(stalled_us=self._stalls.total_us, keeps=not self._quiet)
        self._sketch = Sketch()
        self._stage = Stage(
            records=Budget(plan.delivery.buffer_bytes),
            rows=Budget(rows_bytes(plan)),
            patience_s=self._patience_s,
            place=self._place if goes_straight(plan) else None,
        )
        self._measure = measure_of(plan)
        self._ship = self._make_ship(request, address, credentials)
        self._declaring = Declaring(
            trace=self._trace,
            sketch=self._sketch,
            accounts=self._accounts,
            stalls=self._stalls,
            submit=self._ship.submit,
        )
        self._limits = Limits(variables or {}, self._ship.submit, self._voice.once)
        self._outlet = Outlet(
            accounts=self._accounts,
            stalls=self._stalls,
            stage=self._stage,
            measure=self._measure,
            submit=self._ship.submit,
            on_lost=self._voice.lost,
            batch_rows=batch_rows(plan),
        )
        self._callers = Callers(self._stage, self._ship.submit) if keeps_stacks(plan) else None
        self._trigger = self._make_trigger()
        self.undelivered = 0
        """Tensors that had not reached an agent when `close` returned."""
        self.refused = False
        """Whether the agent refused this rank, by then."""
        self.recorder: Recording = self._make_recorder()
        """What adapters hand operators and events to."""

    def start(self) -> None:
        """Connect to the agent and begin the plan's first iteration."""
        call_in_children(self._disarm_in_child)
        self._limits.start()
        self._ship.start(FIRST_ANSWER_S)
        self.begin_iteration(self._course.iteration)

    # -- iterations, called by the session on the training thread

    @property
    def iteration(self) -> int:
        """The iteration that runs now."""
        return self._course.iteration

    @property
    def armed(self) -> bool:
        """Whether tensors of the iteration that runs now are kept on this rank."""
        return self._course.armed

    @property
    def losses(self) -> int:
        """Tensors lost so far, over all reasons."""
        return sum(self._accounts.losses.values())

    def begin_iteration(self, iteration: int) -> None:
        """Make this the running iteration."""
        self._course.begin(iteration)
        self._ranges.restart()
        self._trace.begin_iteration(iteration)

    def end_iteration(self, *, ran: bool) -> None:
        """Declare the running iteration over; one in which nothing ran is not declared."""
        if self._in_child:
            return
        iteration = self._course.iteration
        self._trigger.end()
        self._flush(iteration)
        span = self._trace.end_iteration()
        if not self._course.end(ran=ran):
            return
        if self._quiet and not self._accounts.expects(iteration):
            self._accounts.settle(iteration)
            return
        self._declaring.end(iteration, span)

    def switch(self, on: bool) -> None:
        """Dump from now on, or no longer, whatever iterations the plan names."""
        self._course.switch(on)
        self._ranges.restart()
        if not on:
            self._trigger.end()

    def limit(self, name: str, seconds: float) -> None:
        """Take a limit to communication that no variable says."""
        if not self._in_child:
            self._limits.limit(name, seconds)

    def add_model(self, graph: int, name: str) -> None:
        """Say that a model was added, and what it is called: its operators are to be described."""
        self._heads.name_model(graph, name)
        self._filter.forget()
        self._course.describe_again()

    # -- the end

    def close(self) -> None:
        """Say goodbye, deliver what waits, and tell what was lost."""
        if self._in_child:
            return
        self._course.leave()
        self._trigger.end()
        self._flush(self._course.iteration)
        self._trace.end_iteration()
        self._declaring.events()
        if self._course.ever_armed and (self._accounts.kept or not self._quiet):
            self._declaring.graphs()
        self.refused = self._ship.link is Link.REFUSED
        accounts = self._accounts
        run = run_of(self._device, self._course, self._filter, accounts, refused=self.refused)
        retired_in = self._course.retired_in
        farewell = farewell_of(self._plan, run, self._filter.unmatched, retired_in=retired_in)
        self._ship.submit(SessionEnd(self._course.seen, farewell.notes))
        left = self._ship.close(self._plan.delivery.block_timeout_s)
        if left:
            self._accounts.lost_on_the_way(left, NOT_TAKEN)
        self.undelivered = self._undelivered()
        self._voice.goodbye(farewell.warnings, farewell.remarks)
        self._voice.left_in_slab(self._ship.left_in_slab, self._ship.link)
        self._voice.losses(self._accounts.losses, self._ship.lost_declarations)
        if self._callers is not None:
            self._voice.stacks_lost(self._callers.lost)
        self._voice.close()

    def _undelivered(self) -> int:
        """Return tensors that no agent has taken, though the plan wished for all of them."""
        if self._ship.link in (Link.ABSENT, Link.OPENING, Link.REFUSED):
            return self.losses
        return self._accounts.losses.get(NOT_TAKEN, 0)

    def _flush(self, iteration: int) -> None:
        """Send what waited for the end of the iteration."""
        self._outlet.flush(iteration)
        if self._callers is not None:
            self._callers.flush()

    # -- what the rooms and the interpreter call back

    def _disarm_in_child(self) -> None:
        # A fork copies neither the sender's thread nor the channel: the session is the parent's.
        # Its shared memory is still mapped here, and is the parent's as well.
        self._in_child = True
        self._course.leave()
        self._declaring.disarm()
        self._ship.disarm()

    def _place(self, head: RecordHead, source: TensorSource) -> Placing:
        return self._ship.place(head, source, self._patience_s)

    def _torn(self, head: RecordHead) -> None:
        # The agent counts it in its iteration: the record's number is given.
        self._accounts.lost_on_the_way(1, COPY_FAILED)
        self._voice.lost(COPY_FAILED, head.kind.op_name)

    def _patience_s(self) -> float:
        """Return how long a tensor may still wait for room."""
        ship = self._ship
        return patience_s(self._plan, link=ship.link, busy=ship.busy, idle_s=ship.idle_s())

    def _link_changed(self, link: Link, reason: str) -> None:
        if link is Link.REFUSED:
            self._course.leave()
        self._voice.link_changed(link, reason, closing=self._ship.closing)

    # -- wiring

    def _make_ship(
        self, request: SessionRequest, address: str, credentials: Credentials | None
    ) -> Ship:
        return Ship(
            replace(request, wants_slab=wants_slab(self._plan, address)),
            address,
            credentials,
            on_taken=self._stage.release,
            on_torn=self._torn,
            on_tick=lambda: self._declaring.events(),
            on_warning=self._voice.once,
            on_link=self._link_changed,
            on_stream=self._voice.no_slab,
        )

    def _make_trigger(self) -> Trigger:
        reading = Reading(
            self._plan,
            self._course,
            heads=self._heads,
            stage=self._stage,
            measure=self._measure,
            stalls=self._stalls,
        )
        return trigger_of(
            self._plan, self._filter, reading, self._outlet, self._course, warn=self._voice.once
        )

    def _make_recorder(self) -> Recording:
        return Recording(
            self._course,
            self._filter,
            self._trigger,
            self._ranges,
            trace=self._trace,
            sketch=self._sketch,
            aliases=Aliases() if profile_of(self._plan).short_names else None,
            callers=self._callers,
            keeps_arguments=self._plan.content.kernel_arguments,
            voice=self._voice,
            on_events=self._declaring.events,
            on_limit=self._limits.group,
        )
