"""Composition root of the recorder: connects filter, triggers, record builder, staging buffer and
transport of one rank, and begins and ends its iterations. Adapters use its `recorder`. No method
raises into the job; in a forked child the pipeline switches itself off.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from rankdump._core.black_box import FreezeNotice
from rankdump._core.determinism import ReplayReport, ReplayTally
from rankdump._core.job_control import PlanChange, PlanSchedule
from rankdump._core.plan import DumpPlan, IterationSelection, OperatorSelection
from rankdump._core.session_protocol import ChangedPlan, RecordHead, SessionEnd, SessionRequest
from rankdump._kernels.kernel_functions import KERNELS
from rankdump._layout.profile import OperatorAliases
from rankdump._recorder.black_box_recorder import BlackBoxRecorder
from rankdump._recorder.event_trace import EventTrace, now_us
from rankdump._recorder.iteration_state import IterationCounters, IterationState, StallTimer
from rankdump._recorder.metadata_sender import (
    CallStackSender,
    GraphBuilder,
    MetadataSender,
    TimeoutReporter,
)
from rankdump._recorder.order_responder import OrderResponder
from rankdump._recorder.plan_settings import (
    compute_batch_rows,
    compute_row_buffer_bytes,
    find_change_fault,
    has_call_stacks,
    is_copied_directly,
    is_governed,
    is_shared_memory_wanted,
    join_operators,
    make_statistics_calculator,
    make_wait_policy,
    select_layout,
    select_profile,
)
from rankdump._recorder.record_builder import (
    RecordBuilder,
    RecordNamer,
    RecordSender,
    StagingBudget,
    StagingBuffer,
)
from rankdump._recorder.record_filter import OperatorRanges, RecordFilter, describe_unmatched
from rankdump._recorder.recorder import DumpRecorder
from rankdump._recorder.run_card_recorder import RunCardRecorder
from rankdump._recorder.run_summary import make_run_facts, summarize_run
from rankdump._recorder.session_logger import SessionLogger
from rankdump._recorder.step_overhead import StepOverhead
from rankdump._recorder.triggers import make_trigger
from rankdump._shm.slab_format import JOURNAL_SLAB_VERSION
from rankdump._transport.agent_client import AgentClient
from rankdump._transport.frame_queue import COPY_FAILED, NOT_TAKEN_BY_AGENT, REJECTED_BY_AGENT
from rankdump._transport.send_buffer import LinkState, SendBuffer
from rankdump._transport.step_outbox import StepOutbox
from rankdump._wire.channel import TlsCredentials


def call_in_forked_children(method: Callable[[], None]) -> None:
    """Call a bound method in every child process forked from now on, as long as its
    object lives.
    """
    reference = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    os.register_at_fork(after_in_child=call)


_UNOPENED_LINKS = (
    LinkState.STARTING,
    LinkState.ABSENT,
    LinkState.UNRESPONSIVE,
    LinkState.OPENING,
    LinkState.WAITING,
    LinkState.REJECTED,
)
FIRST_ANSWER_TIMEOUT_S = 5.0
"""Longest wait at the start of a job for an agent that neither accepts nor rejects the rank."""


class DumpPipeline:
    """Pipeline of one rank from its operators to the agent; begins and ends iterations."""

    def __init__(
        self,
        plan: DumpPlan,
        request: SessionRequest,
        address: str,
        variables: Mapping[str, str] | None = None,
        credentials: TlsCredentials | None = None,
        *,
        missing: str = "",
        is_starting: Callable[[], bool] | None = None,
    ) -> None:
        """`variables` are the environment variables that may set a timeout of communication;
        `missing` is the reason why no agent is expected; `is_starting` is passed to `AgentClient`.
        """
        self._device, self._schedule = request.device, PlanSchedule(plan)
        self._quiet, self._in_child = plan.selection.trigger == "exception", False
        self._iteration_state = IterationState(plan, request.device)
        self._session_logger = SessionLogger(
            request, address, plan.delivery.buffer_bytes, missing=missing
        )
        self._counters, self._stalls = IterationCounters(), StallTimer()
        # With the trigger `exception` only ranks that raised send anything, and their events alone
        # would look like a job in which all other ranks are missing.
        self._trace = EventTrace(stalled_us=self._stalls.total_us, keeps=not self._quiet)
        self._graph_builder = GraphBuilder()
        self._namer = RecordNamer(
            rank=request.rank,
            net_name=plan.output.net_name,
            clock_us=now_us,
            layout=select_layout(plan),
        )
        self._ranges = OperatorRanges(
            plan.selection, self._namer.get_model_name, self._session_logger.warn_once
        )
        self._filter = RecordFilter(plan, self._namer.get_model_name, self._ranges.is_in_range)
        self._make_buffers(plan)
        self.black_box: BlackBoxRecorder | None = None
        """The black box of this rank; None if there is none."""
        self._make_client(plan, request, address, credentials, is_starting)
        self._make_senders(plan, request.rank, variables or {})
        self._replays, self._replayed_in = ReplayTally(), -1
        self.undelivered = 0
        """Tensors that had not reached an agent when `close` returned."""
        self.refused = False
        """Whether the agent had rejected this rank when `close` returned."""
        self.recorder = self._make_recorder(plan)
        """Recorder that adapters call."""
        self.card: RunCardRecorder | None = None
        """The run card of this rank; None if the plan has none."""
        if plan.content.run_card:
            layouts, warn = self.recorder.declared_layouts, self._session_logger.warn_once
            self.card = RunCardRecorder(layouts, self.black_box, warn=warn)
        self.recorder.card = self.card

    # -- wiring

    def _make_buffers(self, plan: DumpPlan) -> None:
        """Make the buffers that hold tensors until they are sent."""
        self._send_buffer = SendBuffer(
            on_release=lambda item: self._staging.release(item),
            on_copy_failed=self._count_failed_copy,
            wait_policy=make_wait_policy(plan),
            on_journal=self._trace.use_journal,
        )
        self._staging: StagingBuffer = StagingBuffer(
            self._send_buffer,
            records=StagingBudget(plan.delivery.buffer_bytes),
            rows=StagingBudget(compute_row_buffer_bytes(plan)),
            copies_directly=is_copied_directly(plan),
        )

    def _make_client(
        self,
        plan: DumpPlan,
        request: SessionRequest,
        address: str,
        credentials: TlsCredentials | None,
        is_starting: Callable[[], bool] | None,
    ) -> None:
        """Make the client of the agent, the black box whose steps it sends, and the responder to
        orders.
        """
        settings, outbox = plan.black_box, None
        if settings.steps:
            outbox = StepOutbox(settings.steps, settings.tensor_bytes)
            self.black_box = BlackBoxRecorder(
                settings,
                outbox,
                rank=request.rank,
                warn=self._session_logger.warn_once,
                dump=self._dump_operators,
            )
        self._responder = OrderResponder(
            self._schedule, self._find_change_fault, self.change_plan, self._find_change_note
        )
        self._client = AgentClient(
            replace(
                request,
                wants_slab=is_shared_memory_wanted(plan, address),
                slab_version=JOURNAL_SLAB_VERSION,
                takes_orders=True,
            ),
            self._send_buffer,
            address,
            credentials,
            outbox=outbox,
            on_freeze=self._answer_freeze,
            on_order=self._responder.answer,
            on_tick=self._send_pending,
            on_warning=self._session_logger.warn_once,
            on_link_change=self._link_changed,
            on_slab_unused=self._session_logger.warn_no_shared_memory,
            is_starting=is_starting,
        )

    def _make_senders(self, plan: DumpPlan, rank: int, variables: Mapping[str, str]) -> None:
        """Make the parts that build and send records and metadata."""
        self._metadata_sender = MetadataSender(
            trace=self._trace,
            graph_builder=self._graph_builder,
            counters=self._counters,
            stalls=self._stalls,
            send_buffer=self._send_buffer,
        )
        warn_once = self._session_logger.warn_once
        self._timeout_reporter = TimeoutReporter(variables, self._send_buffer, warn_once)
        self._overhead: StepOverhead | None = None
        if is_governed(plan):
            self._overhead = StepOverhead(
                plan,
                rank=rank,
                find_timeout_us=self._timeout_reporter.find_tightest_us,
                warn=lambda text, about: warn_once(text, about=about),
            )
        self._calculator = make_statistics_calculator(plan)
        self._record_sender = RecordSender(
            iteration_state=self._iteration_state,
            counters=self._counters,
            stalls=self._stalls,
            staging=self._staging,
            calculator=self._calculator,
            send_buffer=self._send_buffer,
            on_lost=self._session_logger.warn_lost_tensor,
            batch_rows=compute_batch_rows(plan),
        )
        self._stack_sender = (
            CallStackSender(self._staging, self._send_buffer) if has_call_stacks(plan) else None
        )
        self._record_builder = RecordBuilder(
            plan,
            self._iteration_state,
            namer=self._namer,
            staging=self._staging,
            calculator=self._calculator,
            stalls=self._stalls,
            overhead=self._overhead,
        )

    def _make_recorder(self, plan: DumpPlan) -> DumpRecorder:
        self._trigger = make_trigger(
            plan,
            self._filter,
            self._record_builder,
            self._record_sender,
            on_limit=self._iteration_state.stop_after_current,
            warn=self._session_logger.warn_once,
        )
        return DumpRecorder(
            self._iteration_state,
            self._filter,
            self._trigger,
            self._ranges,
            trace=self._trace,
            graph_builder=self._graph_builder,
            aliases=OperatorAliases() if select_profile(plan).short_names else None,
            stack_sender=self._stack_sender,
            keeps_arguments=plan.content.kernel_arguments,
            session_logger=self._session_logger,
            on_events=self._metadata_sender.send_events,
            on_limit=self._timeout_reporter.add_group,
        )

    def start(self) -> None:
        """Connect to the agent and begin the plan's first iteration."""
        call_in_forked_children(self._disarm_in_child)
        slowness = KERNELS.explain_slowness()
        if self._calculator and slowness:
            self._session_logger.warn_once(slowness)
        self._timeout_reporter.start()
        self._client.start(FIRST_ANSWER_TIMEOUT_S)
        if self._overhead is not None:
            self._overhead.start()
        self.begin_iteration(self._iteration_state.iteration)

    # -- iterations, called by the session on the training thread

    @property
    def iteration(self) -> int:
        """Number of the running iteration."""
        return self._iteration_state.iteration

    @property
    def armed(self) -> bool:
        """Whether the running iteration is dumped on this rank."""
        return self._iteration_state.armed

    @property
    def has_run(self) -> bool:
        """Whether any operator ran in the running iteration."""
        return self._iteration_state.active

    @property
    def lost_tensors(self) -> int:
        """Tensors lost so far, over all reasons."""
        return sum(self._counters.losses_by_reason.values())

    def begin_iteration(self, iteration: int) -> None:
        """Make this the running iteration."""
        if not self._in_child:
            self._use_plan_of(iteration)
        self._responder.begin_iteration(iteration)
        self._iteration_state.begin(iteration)
        self._ranges.restart()
        self._trace.begin_iteration(iteration)
        if self.black_box is not None:
            self.black_box.begin_step(iteration)
        if self.card is not None:
            self.card.begin_step()

    def end_iteration(self, *, ran: bool) -> None:
        """Declare that the running iteration has ended; an iteration in which nothing ran is not
        declared.
        """
        if self._in_child:
            return
        iteration = self._iteration_state.iteration
        self._trigger.end_all_calls()
        self._flush()
        span = self._trace.end_iteration()
        if self.black_box is not None:
            self.black_box.end_step(ran=ran)
        if self._overhead is not None:
            dumped = self._iteration_state.was_armed and (ran or self.has_run)
            dumped = dumped and self._replayed_in != iteration  # hooks of the replay took time
            self._overhead.end_iteration(iteration, dumped=dumped)
        if not self._iteration_state.end(ran=ran):
            return
        if self._quiet and not self._counters.expects(iteration):
            self._counters.close_iteration(iteration)
            return
        card = b"" if self.card is None else self.card.make_card()
        self._metadata_sender.end_iteration(iteration, span, card)

    def set_microbatch(self, index: int) -> None:
        """Set the number of the micro-batch that the script runs from now on."""
        self._iteration_state.set_microbatch(index)

    def set_dumping(self, on: bool) -> None:
        """Start or stop dumping now, whatever iterations the plan names."""
        self._iteration_state.set_dumping(on)
        self._ranges.restart()
        if not on:
            self._trigger.end_all_calls()

    @contextmanager
    def hide(self) -> Generator[None]:
        """Dump nothing in the block, which repeats a part of the running iteration."""
        self._iteration_state.hide(True)
        try:
            yield
        finally:
            self._iteration_state.hide(False)

    def add_replay(self, report: ReplayReport) -> None:
        """Add the result of a step that was run twice to the run card, the log and the notes."""
        self._replays.add(report)
        self._replayed_in = self._iteration_state.iteration
        if report.is_deterministic is False or report.skipped:
            self._session_logger.warn_once(str(report))
        if self.card is not None and not report.skipped:
            self.card.note({"replay.differing": report.differing})

    def change_plan(self, change: PlanChange, begin: int, *, iterations: int = 0) -> int | str:
        """Change the plan from an iteration on, for a number of iterations or for good.

        May be called from any thread. Return the first iteration that has the change, which is a
        later one than `begin` if that iteration runs already; or return why the plan cannot be
        changed.
        """
        fault = self._find_change_fault(change)
        return fault or self._schedule.add(change, begin, iterations)

    def _dump_operators(
        self, operators: OperatorSelection, begin: int, iterations: int
    ) -> int | str:
        """Keep the tensors of these operators for some iterations, in addition to those of the
        plan.
        """
        plan = self._schedule.find_latest()
        joined = join_operators(plan.selection, operators)
        if isinstance(joined, str):
            return joined
        saved = "full" if plan.content.saved == "statistic" else None
        change = PlanChange(IterationSelection(), joined, saved)
        return self.change_plan(change, begin, iterations=iterations)

    def _find_change_fault(self, change: PlanChange) -> str:
        if not self._client.changes_plans:
            return "the agent of this host is of an earlier release"
        return find_change_fault(self._schedule.find_latest(), change, self._device)

    def _find_change_note(self, change: PlanChange) -> str:
        """Return a clause about the chosen operators that the rank has not seen yet."""
        if change.operators is None:
            return ""
        names = self._namer.op_names | self._filter.op_names
        if self.black_box is not None:
            names |= self.black_box.op_names
        return describe_unmatched(change.operators, names)

    def _use_plan_of(self, iteration: int) -> None:
        """Let all parts use the plan of an iteration, after everything of the iteration before was
        sent.
        """
        before = self._schedule.plan
        found = self._schedule.begin_iteration(iteration)
        self._iteration_state.use_plan(found)
        plan = found.plan
        if plan is before or plan == before:
            return
        self._filter.use_plan(plan)
        self._ranges.use_selection(plan.selection)
        self._calculator = make_statistics_calculator(plan)
        self._staging.resize_rows(compute_row_buffer_bytes(plan))
        self._send_buffer.use_wait_policy(make_wait_policy(plan))
        self._record_builder.use_plan(plan, self._calculator)
        self._record_sender.use_calculator(self._calculator, compute_batch_rows(plan))
        if self._overhead is not None:
            self._overhead.use_plan(plan)
        self._send_buffer.submit(ChangedPlan(iteration, plan))

    def limit(self, name: str, seconds: float) -> None:
        """Set a timeout of communication that no environment variable sets."""
        if not self._in_child:
            self._timeout_reporter.set_limit(name, seconds)

    def add_model(self, graph: int, name: str) -> None:
        """Add a model with its name; its operators are described in the next armed iteration."""
        self._namer.name_model(graph, name)
        if self.card is not None:
            self.card.name_model(graph, name)
        self._filter.clear_cache()
        self._iteration_state.describe_again()

    # -- the end

    def close(self, *, raised: bool = False) -> None:
        """End the session: deliver buffered data, and log what was lost.

        `raised` states that an error ends the session during the running iteration.
        """
        if self._in_child:
            return
        self._iteration_state.disable()
        self._trigger.end_all_calls()
        self._flush()
        self._trace.end_iteration()
        self._metadata_sender.send_events()
        if self.black_box is not None:
            self.black_box.close(raised=raised)
        if self._iteration_state.ever_armed and (self._counters.kept_tensors or not self._quiet):
            self._metadata_sender.send_graphs()
        self.refused = self._client.link is LinkState.REJECTED
        state, plan = self._iteration_state, self._schedule.plan
        run = make_run_facts(
            self._device,
            state,
            self._filter,
            self._counters,
            refused=self.refused,
            unseen_collectives=dict(self._trace.unseen_count),
        )
        if self._overhead is not None:
            self._overhead.stop()
        summary = summarize_run(
            plan,
            run,
            self._filter.unmatched,
            retired_in=state.retired_in,
            overhead="" if self._overhead is None else self._overhead.summarize(),
            unmatched_rules=self.black_box.list_unmatched_rules() if self.black_box else (),
            rule_notes=self.black_box.list_notes() if self.black_box else (),
            replay_notes=self._replays.list_notes(),
        )
        raised_in = state.iteration if raised else None
        self._send_buffer.submit(SessionEnd(state.iterations_seen, summary.notes, raised_in))
        left = self._client.close(plan.delivery.block_timeout_s)
        if left:
            self._counters.count_undelivered(left, NOT_TAKEN_BY_AGENT)
        losses = self._counters.losses_by_reason
        # If no session was ever opened, no agent has taken any tensor.
        is_opened = self._client.link not in _UNOPENED_LINKS
        self.undelivered = losses.get(NOT_TAKEN_BY_AGENT, 0) if is_opened else self.lost_tensors
        self._session_logger.log_summary(summary.warnings, summary.remarks)
        self._session_logger.warn_unwritten_tensors(self._client.left_in_slab, self._client.link)
        self._session_logger.warn_losses(losses, self._client.lost_metadata)
        if self._stack_sender is not None:
            self._session_logger.warn_lost_stacks(self._stack_sender.lost_calls)
        self._session_logger.close()

    def _flush(self) -> None:
        """Send the rows and stacks that waited for the end of the iteration."""
        self._record_sender.flush()
        if self._stack_sender is not None:
            self._stack_sender.flush()

    # -- callbacks of the parts and the interpreter

    def _disarm_in_child(self) -> None:
        # A fork copies neither the sender's thread nor the channel: the session and the mapped
        # shared memory belong to the parent.
        self._in_child = True
        if self._overhead is not None:
            self._overhead.disarm()
        if self.black_box is not None:
            self.black_box.disarm()
        self._iteration_state.disable()
        self._metadata_sender.disarm()
        # The mapped journal is shared with the parent process, and belongs to it.
        self._trace.use_journal(None)
        self._client.disarm()

    def _count_failed_copy(self, head: RecordHead) -> None:
        # The record's sequence number is already assigned, so the agent counts the loss in the
        # balance of its iteration.
        self._counters.count_undelivered(1, COPY_FAILED)
        self._session_logger.warn_lost_tensor(COPY_FAILED, head.kind.op_name)

    def _link_changed(self, link: LinkState, reason: str) -> None:
        if link is LinkState.REJECTED and self._client.was_opened:
            # A part of the dump is already in the tree, so the tensors missing from now on must be
            # counted.
            self._record_builder.lose_further(REJECTED_BY_AGENT)
            iteration = self._iteration_state.iteration
            reason = f"{reason}; its tensors are counted as lost, from iteration {iteration} on"
        elif link is LinkState.REJECTED:
            self._iteration_state.disable()
        self._session_logger.log_link_change(link, reason, closing=self._client.closing)

    def _answer_freeze(self, notice: FreezeNotice) -> None:
        if self.black_box is not None:
            self.black_box.answer_freeze(notice)

    def _send_pending(self) -> None:
        """Send events, graphs and progress that no tensor has taken along, on the thread of the
        connection.
        """
        self._metadata_sender.send_events()
        if self.black_box is not None:
            self.black_box.report_progress()
