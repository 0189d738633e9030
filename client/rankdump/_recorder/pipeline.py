"""Composition root of the recorder: connects filter, triggers, record builder, staging buffer and
transport of one rank, and begins and ends its iterations. Adapters use its `recorder`; nothing
here raises into the job, and in a forked child it disarms itself.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace

from rankdump._core.plan import DumpPlan
from rankdump._core.recorder_protocol import PlacementResult, TensorSource
from rankdump._core.session_protocol import RecordHead, SessionEnd, SessionRequest
from rankdump._layout.profile import OperatorAliases
from rankdump._recorder.event_trace import EventTrace
from rankdump._recorder.graph_builder import GraphBuilder
from rankdump._recorder.iteration_state import IterationCounters, IterationState, StallTimer
from rankdump._recorder.metadata_sender import CallStackSender, MetadataSender, TimeoutReporter
from rankdump._recorder.plan_settings import (
    compute_batch_rows,
    compute_remaining_wait_s,
    compute_row_buffer_bytes,
    has_call_stacks,
    is_copied_directly,
    is_shared_memory_wanted,
    make_record_namer,
    make_statistics_calculator,
    select_profile,
)
from rankdump._recorder.record_builder import COPY_FAILED, RecordBuilder, RecordSender
from rankdump._recorder.record_filter import OperatorRanges, RecordFilter
from rankdump._recorder.recorder import DumpRecorder
from rankdump._recorder.run_summary import make_run_facts, summarize_run
from rankdump._recorder.session_logger import SessionLogger
from rankdump._recorder.staging_buffer import StagingBudget, StagingBuffer
from rankdump._recorder.triggers import DumpTrigger, make_trigger
from rankdump._transport.agent_client import AgentClient
from rankdump._transport.connection import LinkState
from rankdump._wire.channel import TlsCredentials


def call_in_forked_children(method: Callable[[], None]) -> None:
    """Call a bound method in every process forked from now on, as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    os.register_at_fork(after_in_child=call)


NOT_TAKEN_BY_AGENT = "not_taken_by_agent"
FIRST_ANSWER_TIMEOUT_S = 5.0
"""Longest a job waits at its start for an agent that neither answers nor refuses."""


class DumpPipeline:
    """One rank's way from operator to agent: iterations begin and end here."""

    def __init__(
        self,
        plan: DumpPlan,
        request: SessionRequest,
        address: str,
        variables: Mapping[str, str] | None = None,
        credentials: TlsCredentials | None = None,
        *,
        missing: str = "",
    ) -> None:
        """`variables` are those of the environment that set a limit to communication; `missing`
        says why no agent is to be expected.
        """
        self._plan, self._device = plan, request.device
        self._quiet = plan.selection.trigger == "exception"
        self._in_child = False
        self._course = IterationState(plan, request.device)
        self._voice = SessionLogger(request, address, plan.delivery.buffer_bytes, missing=missing)
        self._accounts, self._stalls = IterationCounters(), StallTimer()
        self._heads = make_record_namer(plan, request.rank)
        self._ranges = OperatorRanges(plan.selection, self._heads.model, self._voice.warn_once)
        self._filter = RecordFilter(plan, self._heads.model, self._ranges.is_in_range)
        # One rank's events alone would read as a job in which all others are missing.
        self._trace = EventTrace(stalled_us=self._stalls.total_us, keeps=not self._quiet)
        self._sketch = GraphBuilder()
        self._stage = StagingBuffer(
            records=StagingBudget(plan.delivery.buffer_bytes),
            rows=StagingBudget(compute_row_buffer_bytes(plan)),
            patience_s=self._patience_s,
            place=self._place if is_copied_directly(plan) else None,
        )
        self._measure = make_statistics_calculator(plan)
        self._ship = self._make_ship(request, address, credentials)
        self._declaring = MetadataSender(
            trace=self._trace,
            sketch=self._sketch,
            accounts=self._accounts,
            stalls=self._stalls,
            submit=self._ship.submit,
        )
        self._limits = TimeoutReporter(variables or {}, self._ship.submit, self._voice.warn_once)
        self._outlet = RecordSender(
            accounts=self._accounts,
            stalls=self._stalls,
            stage=self._stage,
            measure=self._measure,
            submit=self._ship.submit,
            on_lost=self._voice.warn_lost_tensor,
            batch_rows=compute_batch_rows(plan),
        )
        self._callers = (
            CallStackSender(self._stage, self._ship.submit) if has_call_stacks(plan) else None
        )
        self._trigger = self._make_trigger()
        self.undelivered = 0
        """Tensors that had not reached an agent when `close` returned."""
        self.refused = False
        """Whether the agent refused this rank, by then."""
        self.recorder: DumpRecorder = self._make_recorder()
        """What adapters hand operators and events to."""

    def start(self) -> None:
        """Connect to the agent and begin the plan's first iteration."""
        call_in_forked_children(self._disarm_in_child)
        self._limits.start()
        self._ship.start(FIRST_ANSWER_TIMEOUT_S)
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
    def lost_tensors(self) -> int:
        """Tensors lost so far, over all reasons."""
        return sum(self._accounts.losses_by_reason.values())

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
        self._trigger.end_all_calls()
        self._flush(iteration)
        span = self._trace.end_iteration()
        if not self._course.end(ran=ran):
            return
        if self._quiet and not self._accounts.expects(iteration):
            self._accounts.close_iteration(iteration)
            return
        self._declaring.end_iteration(iteration, span)

    def set_dumping(self, on: bool) -> None:
        """Dump from now on, or no longer, whatever iterations the plan names."""
        self._course.set_dumping(on)
        self._ranges.restart()
        if not on:
            self._trigger.end_all_calls()

    def limit(self, name: str, seconds: float) -> None:
        """Take a limit to communication that no variable says."""
        if not self._in_child:
            self._limits.set_limit(name, seconds)

    def add_model(self, graph: int, name: str) -> None:
        """Say that a model was added, and what it is called: its operators are to be described."""
        self._heads.name_model(graph, name)
        self._filter.clear_cache()
        self._course.describe_again()

    # -- the end

    def close(self) -> None:
        """Say goodbye, deliver what waits, and tell what was lost."""
        if self._in_child:
            return
        self._course.disable()
        self._trigger.end_all_calls()
        self._flush(self._course.iteration)
        self._trace.end_iteration()
        self._declaring.send_events()
        if self._course.ever_armed and (self._accounts.kept_tensors or not self._quiet):
            self._declaring.send_graphs()
        self.refused = self._ship.link is LinkState.REFUSED
        accounts = self._accounts
        run = make_run_facts(
            self._device, self._course, self._filter, accounts, refused=self.refused
        )
        retired_in = self._course.retired_in
        farewell = summarize_run(self._plan, run, self._filter.unmatched, retired_in=retired_in)
        self._ship.submit(SessionEnd(self._course.iterations_seen, farewell.notes))
        left = self._ship.close(self._plan.delivery.block_timeout_s)
        if left:
            self._accounts.count_undelivered(left, NOT_TAKEN_BY_AGENT)
        self.undelivered = self._undelivered()
        self._voice.log_summary(farewell.warnings, farewell.remarks)
        self._voice.warn_unwritten_tensors(self._ship.left_in_slab, self._ship.link)
        self._voice.warn_losses(self._accounts.losses_by_reason, self._ship.lost_declarations)
        if self._callers is not None:
            self._voice.warn_lost_stacks(self._callers.lost_calls)
        self._voice.close()

    def _undelivered(self) -> int:
        """Return tensors that no agent has taken, though the plan wished for all of them."""
        if self._ship.link in (LinkState.ABSENT, LinkState.OPENING, LinkState.REFUSED):
            return self.lost_tensors
        return self._accounts.losses_by_reason.get(NOT_TAKEN_BY_AGENT, 0)

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
        self._course.disable()
        self._declaring.disarm()
        self._ship.disarm()

    def _place(self, head: RecordHead, source: TensorSource) -> PlacementResult:
        return self._ship.place_record(head, source, self._patience_s)

    def _torn(self, head: RecordHead) -> None:
        # The agent counts it in its iteration: the record's number is given.
        self._accounts.count_undelivered(1, COPY_FAILED)
        self._voice.warn_lost_tensor(COPY_FAILED, head.kind.op_name)

    def _patience_s(self) -> float:
        """Return how long a tensor may still wait for room."""
        ship = self._ship
        return compute_remaining_wait_s(
            self._plan, link=ship.link, busy=ship.has_waiting_tensors, idle_s=ship.idle_s()
        )

    def _link_changed(self, link: LinkState, reason: str) -> None:
        if link is LinkState.REFUSED:
            self._course.disable()
        self._voice.log_link_change(link, reason, closing=self._ship.closing)

    # -- wiring

    def _make_ship(
        self, request: SessionRequest, address: str, credentials: TlsCredentials | None
    ) -> AgentClient:
        return AgentClient(
            replace(request, wants_slab=is_shared_memory_wanted(self._plan, address)),
            address,
            credentials,
            on_taken=self._stage.release,
            on_torn=self._torn,
            on_tick=lambda: self._declaring.send_events(),
            on_warning=self._voice.warn_once,
            on_link=self._link_changed,
            on_stream=self._voice.warn_no_shared_memory,
        )

    def _make_trigger(self) -> DumpTrigger:
        reading = RecordBuilder(
            self._plan,
            self._course,
            heads=self._heads,
            stage=self._stage,
            measure=self._measure,
            stalls=self._stalls,
        )
        return make_trigger(
            self._plan,
            self._filter,
            reading,
            self._outlet,
            self._course,
            warn=self._voice.warn_once,
        )

    def _make_recorder(self) -> DumpRecorder:
        return DumpRecorder(
            self._course,
            self._filter,
            self._trigger,
            self._ranges,
            trace=self._trace,
            sketch=self._sketch,
            aliases=OperatorAliases() if select_profile(self._plan).short_names else None,
            callers=self._callers,
            keeps_arguments=self._plan.content.kernel_arguments,
            voice=self._voice,
            on_events=self._declaring.send_events,
            on_limit=self._limits.add_group,
        )
