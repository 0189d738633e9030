"""The black box of an agent: receives steps and faults of ranks, watches ranks, and freezes the
rings of a job.

One thread does all work of a freeze: it decides, writes the present content of the rings to a raw
file at once, notifies the ranks and the coordinator, waits for a few more steps, completes the raw
file and writes the tree. Every cause, whatever its origin, enters by `BlackBox.submit`, and every
freeze begins in `_begin`. A freeze that the coordinator relays enters there as well: it begins a
freeze here, or the freeze that is under way becomes part of it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from rankdump._analysis.black_box.fault_report import describe_bad_value, make_fault_report
from rankdump._core.black_box import FaultKind, FreezeNotice
from rankdump._core.freeze_record import (
    NO_FREEZE_REASON,
    FreezeRecord,
    FrozenCause,
    JobFreeze,
    RelayedFreeze,
    describe_cause,
)
from rankdump._core.log_once import LogOnce
from rankdump._core.plan import BlackBoxSettings
from rankdump._core.status import BlackBoxStatus, FreezeStatus, MetricSample
from rankdump._wire.black_box_messages import fault_notice_from_wire
from rankdump._wire.message_fields import MAX_NAME_CHARACTERS, make_printable
from rankdump.errors import ExhaustedError, ProtocolError, RejectedError, UnavailableError
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.blackbox import freeze_decision as decisions
from rankdumpd.agent.blackbox.freeze_decision import FreezeFacts, compute_tree_bytes
from rankdumpd.agent.blackbox.freeze_state import (
    FreezeAnswer,
    FreezeOrder,
    OpenFreeze,
    PastFreeze,
    RankProgress,
    RecentFreezes,
    describe_rings,
    explain_absence,
    list_notes,
    make_fault_cause,
    make_job_freeze,
    make_loss_cause,
    make_silence_cause,
    select_rings,
    take_rings,
)
from rankdumpd.agent.blackbox.frozen_tree import FrozenTreeWriter, RawBacklog, measure_frozen_trees
from rankdumpd.agent.blackbox.raw_freeze import RawFreezeFolder
from rankdumpd.agent.blackbox.step_ring import StepRing, StepRings
from rankdumpd.agent.limits.resource_limits import ResourceLimits
from rankdumpd.agent.records import read_wall_clock_us
from rankdumpd.agent.session.rank_session import RankSession
from rankdumpd.agent.session.registry import SessionRegistry
from rankdumpd.server.background_thread import BackgroundThread
from rankdumpd.server.metrics import MetricCounters

WATCH_INTERVAL_S = 0.25
ANSWER_TIMEOUT_S = 120.0
"""Longest time in seconds that a request waits for the tree of its freeze."""
MAX_REMEMBERED_FREEZES = 64
MAX_REQUEST_CHARACTERS = 1024
MAX_ORDERS = 4096
"""Largest number of causes that wait for a decision, so that a rank that reports faults all the
time does not fill the memory.
"""
_STACK_KINDS = (FaultKind.LOST_RANK, FaultKind.NO_STEP, FaultKind.WAIT, FaultKind.REQUEST)
"""Causes for which the stacks of the other ranks are needed."""

_logger = logging.getLogger(__name__)


class BlackBox:
    """The rings of an agent and their freezes; safe to use from several threads."""

    def __init__(
        self,
        registry: SessionRegistry,
        limits: ResourceLimits,
        state_dir: Path,
        *,
        host: str,
        audit: Callable[[str, Mapping[str, object]], None],
        counters: MetricCounters,
        report: Callable[[], None],
        on_note: Callable[[RankSession], None],
    ) -> None:
        """`report` sends the recent freezes to the coordinator at once; `on_note` is called when
        the notes in the status of a session have changed.
        """
        self._registry, self._limits, self._host = registry, limits, host
        self._audit, self._counters, self._report = audit, counters, report
        self._on_note = on_note
        self.rings = StepRings(lambda: limits.find_ring_room(registry.live()), time.monotonic)
        self._raw = RawFreezeFolder(state_dir)
        self.thread = BackgroundThread(self._run, "rankdumpd-black-box")
        self._writer = FrozenTreeWriter(
            host,
            str(state_dir),
            find_shortage=limits.find_shortage,
            is_stopping=lambda: self.thread.is_stopping,
            now_us=read_wall_clock_us,
        )
        self._backlog = RawBacklog(self._raw, self._writer, time.monotonic)
        self.recent = RecentFreezes(time.monotonic)
        self._changed = threading.Condition(threading.RLock())
        self._orders: deque[FreezeOrder] = deque()
        self._open: dict[str, OpenFreeze] = {}
        """Freezes that are under way, by job."""
        self._past: dict[str, PastFreeze] = {}
        self._statuses: dict[tuple[str, int], FreezeStatus] = {}
        """Latest freezes by job and time of their beginning, in microseconds; the newest last."""
        self._lost_since_s: dict[str, float] = {}
        self._noted: dict[tuple[str, FaultKind], int] = {}
        """Lost and silent ranks that were reported, by session and kind of fault, with the number
        of steps that the session had finished then.
        """
        self._watches, self._finishing, self._busy = True, False, False
        self._refusals = LogOnce(_logger)

    def take_steps(self, session: RankSession, message: agent_pb2.StepStates) -> None:
        """Put steps into the ring of a session; ProtocolError when a step contradicts itself."""
        for state in message.states:
            self.rings.take_step(session, state)
            notes = (make_printable(each, MAX_NAME_CHARACTERS) for each in state.notes)
            if session.add_notes(state.iteration, notes):
                self._on_note(session)
        if session.request.job_id in self._open:
            with self._changed:
                self._changed.notify_all()

    def take_fault(self, session: RankSession, message: agent_pb2.FaultNotice) -> None:
        """Submit the fault that a rank reports; ProtocolError when the message
        contradicts itself.
        """
        notice = fault_notice_from_wire(message)
        if not session.plan.black_box.steps:
            raise ProtocolError("a fault arrived, and the plan of its session has no black box")
        request = session.request
        cause = make_fault_cause(request.rank, notice, read_wall_clock_us())
        self.submit(FreezeOrder(request.job_id, request.attempt, cause))

    def submit(self, order: FreezeOrder) -> None:
        """Queue a cause, on which the thread will decide."""
        with self._changed:
            if len(self._orders) < MAX_ORDERS:
                self._orders.append(order)
            else:
                order.answer.set_exception(ExhaustedError("too many causes of freezes at once"))
            self._changed.notify_all()

    def join_freeze(self, relayed: RelayedFreeze) -> None:
        """Accept a freeze that the coordinator relays to all agents of a job; may be repeated."""
        freeze = relayed.freeze
        is_new, later = self.recent.note_relayed(relayed)
        if is_new:
            self.submit(FreezeOrder(freeze.job_id, freeze.attempt, freeze.cause, freeze.iteration))
        for cause in later:
            self.submit(FreezeOrder(freeze.job_id, freeze.attempt, cause))

    def find_newest(self, session: RankSession) -> int | str:
        """Return the newest iteration of which a session has a step; if it has none, return why."""
        ring = self.rings.find(session.request.session_id)
        if ring is not None and len(ring):
            return ring.newest_iteration
        return explain_absence(session, was_frozen=ring is not None)

    def freeze_on_request(self, message: agent_pb2.Freeze) -> FreezeAnswer:
        """Freeze a job on request, and wait for its tree.

        RejectedError says why the job is not frozen.
        """
        job_id = message.job_id or self._find_only_job()
        rings = [ring for ring in self.rings.list_rings(job_id) if len(ring)]
        if not rings:
            raise RejectedError(self._explain_no_ring(job_id))
        newest = max(rings, key=lambda ring: ring.session.request.attempt)
        attempt = newest.session.request.attempt
        iteration = max(ring.newest_iteration for ring in select_rings(rings, attempt))
        asked = make_printable(message.text, MAX_REQUEST_CHARACTERS) or NO_FREEZE_REASON
        cause = FrozenCause(FaultKind.REQUEST, iteration, asked, read_wall_clock_us())
        order = FreezeOrder(job_id, attempt, cause)
        self.submit(order)
        try:
            return order.answer.result(ANSWER_TIMEOUT_S)
        except concurrent.futures.TimeoutError:
            raise UnavailableError(
                f"the frozen tree of job {job_id!r} is not written after {ANSWER_TIMEOUT_S:.0f} s; "
                "the agent goes on with it"
            ) from None

    def start(self) -> None:
        """Start the thread, which first writes the trees that an earlier process left unwritten."""
        for record in self._backlog.find_left():
            age_s = max(0, read_wall_clock_us() - record.frozen_us) / 1e6
            begun_s = time.monotonic() - age_s
            self._past[record.job_id] = PastFreeze(record.attempt, record.iteration, begun_s)
            self.recent.add(make_job_freeze(record), age_s=age_s)
        self.thread.start()

    def stop_watching(self) -> None:
        """Report the ranks that are gone now, and no other ranks from then on, because the agent
        stops.
        """
        with self._changed:
            if self._watches:
                self._watch_ranks(dead_only=True)
            self._watches = False

    def finish(self, timeout_s: float) -> None:
        """Complete the freezes that are under way, and write their trees, within `timeout_s`."""
        with self._changed:
            self._finishing = True
            self._changed.notify_all()
        self.wait_idle(timeout_s)

    def wait_idle(self, timeout_s: float) -> int:
        """Wait until no freeze is under way; return how many still are after `timeout_s`."""
        with self._changed:
            self._changed.wait_for(
                lambda: not (self._orders or self._open or self._busy), timeout_s
            )
            return len(self._orders) + len(self._open)

    def stop(self, timeout_s: float) -> bool:
        """Stop; leave unfinished work to the next process and return whether the thread
        has ended.
        """
        self.thread.request_stop()
        with self._changed:
            self._changed.notify_all()
        return self.thread.stop(timeout_s)

    def findings(self) -> list[str]:
        """Return a sentence for each frozen tree that cannot be written."""
        return self._backlog.findings()

    def status(self) -> BlackBoxStatus:
        """Return the size of the rings, and the latest freezes."""
        with self._changed:
            freezes = tuple(self._statuses.values())
        rings = self.rings
        return BlackBoxStatus(
            *(rings.step_count, rings.used_bytes, rings.dropped_steps, freezes),
            rings.dropped_tensors,
        )

    def samples(self) -> list[MetricSample]:
        """Return the current metric samples of the black box."""
        rings = self.rings
        return [
            MetricSample("rankdump_agent_black_box_steps", rings.step_count),
            MetricSample("rankdump_agent_memory_bytes", rings.used_bytes, {"part": "rings"}),
            MetricSample("rankdump_agent_dropped_steps_total", rings.dropped_steps),
            MetricSample("rankdump_agent_dropped_step_tensors_total", rings.dropped_tensors),
        ]

    def _find_only_job(self) -> str:
        jobs = {ring.session.request.job_id for ring in self.rings.list_rings() if len(ring)}
        if len(jobs) > 1:
            named = ", ".join(sorted(jobs)[:10])
            raise RejectedError(f"several jobs have a black box here, name one of them: {named}")
        return next(iter(jobs), "")

    def _explain_no_ring(self, job_id: str) -> str:
        own = [s for s in self._registry.list_sessions() if job_id in ("", s.request.job_id)]
        if job_id and not own:
            return f"no rank of job {job_id!r} is known here"
        if any(session.plan.black_box.steps for session in own):
            who = f"job {job_id!r}" if job_id else "the jobs here"
            if all(session.closed for session in own):
                return f"the ranks of {who} have ended"
            was_frozen = any(session.request.job_id in self._past for session in own)
            since = "since the last freeze" if was_frozen else "yet"
            return f"the ranks of {who} have sent no step {since}"
        if not job_id:
            return "no job here has a black box"
        return (
            f"job {job_id!r} has no black box: the setting rankdump.blackbox of its configuration "
            "switches it on"
        )

    def _run(self) -> None:
        while not self.thread.is_stopping:
            with self._changed:
                self._changed.wait_for(self._has_work, WATCH_INTERVAL_S)
                orders, self._orders = list(self._orders), deque()
                self._busy = True
            for order in orders:
                self._handle(order)
            try:
                self._go_on()
            except Exception:
                # An error must not end the thread, which is needed for other jobs of the agent,
                # too.
                _logger.exception("the black box failed; it is tried again")
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _go_on(self) -> None:
        """Check the ranks, and do the next step of the freezes that are under way."""
        with self._changed:
            if self._watches:
                self._watch_ranks()
                self._discard_rings()
        self._close_complete()
        self.rings.trim()
        self._write_due()

    def _has_work(self) -> bool:
        if self._orders or self.thread.is_stopping:
            return True
        return any(self._is_complete(each) for each in self._open.values())

    def _is_complete(self, freeze: OpenFreeze) -> bool:
        if self._finishing:
            return True
        reach = self.recent.find_reach(make_job_freeze(freeze.record).key)
        if not reach.is_settled and time.monotonic() < freeze.begun_s + decisions.REACH_WAIT_S:
            return False
        going = (each for each in self._list_sessions(freeze.record) if not each.has_ended)
        rings = (self.rings.find(each.request.session_id) for each in going)
        progress = (
            RankProgress(-1, 0.0)
            if ring is None
            else RankProgress(ring.finished_iteration, ring.finished_s)
            for ring in rings
        )
        return freeze.is_complete(progress, time.monotonic())

    def _list_sessions(self, record: FreezeRecord) -> list[RankSession]:
        """Return the sessions with a black box that a freeze concerns."""
        return [
            session
            for session in self._registry.list_sessions()
            if session.request.job_id == record.job_id
            and session.request.attempt == record.attempt
            and session.plan.black_box.steps
        ]

    def _select(self, record: FreezeRecord) -> list[StepRing]:
        return select_rings(self.rings.list_rings(record.job_id), record.attempt)

    def _handle(self, order: FreezeOrder) -> None:
        """Decide on a cause, and freeze the rings or report why not."""
        try:
            reason = self._act(order)
        except OSError as error:
            reason = f"its steps cannot be kept: {error}"
        except Exception as error:
            _logger.exception("job %s: a freeze failed", order.job_id)
            reason = f"the agent failed: {error!r}"
        if reason:
            cause = order.cause
            self._refusals.log(
                logging.WARNING,
                f"job {order.job_id}: {describe_cause(cause)}; not frozen: {reason}",
                about=f"{order.job_id} {cause.kind.value} {cause.rank} {reason[:24]}",
            )
            if order.relayed_iteration is not None:
                freeze = JobFreeze(order.job_id, order.attempt, order.iteration, cause, reason)
                self.recent.add(freeze)
                self._report()
            refusal = RejectedError(f"job {order.job_id!r} is not frozen: {reason}")
            order.answer.set_exception(refusal)

    def _act(self, order: FreezeOrder) -> str:
        """Freeze the rings, or add the cause to a freeze that is under way; return why not, empty
        if done.
        """
        freeze = self._open.get(order.job_id)
        rings = select_rings(self.rings.list_rings(order.job_id), order.attempt)
        if order.relayed_iteration is not None and self._join(order, freeze, rings):
            return ""
        if freeze is not None:
            freeze.append(order)
            _logger.warning("job %s: %s", order.job_id, describe_cause(order.cause))
            return ""
        now_s, facts = time.monotonic(), self._collect_facts(order, rings)
        refusal = decisions.find_refusal(facts, now_s)
        if not refusal:
            # The sizes are added only now, because all frozen files must be measured for that.
            facts = self._add_sizes(facts, order, rings[0])
            refusal = decisions.find_refusal(facts, now_s)
        if not refusal:
            self._begin(order, rings)
        return refusal

    def _join(self, order: FreezeOrder, freeze: OpenFreeze | None, rings: list[StepRing]) -> bool:
        """Join a freeze of the coordinator; return whether this agent has nothing more to do for
        it.
        """
        job_id, attempt, iteration = order.job_id, order.attempt, order.iteration
        if freeze is not None and freeze.record.attempt == attempt:
            before = make_job_freeze(freeze.record)
            if freeze.join(order):
                self.recent.remove(before.key)
                freeze.record, freeze.raw = self._keep(freeze.record, freeze.raw)
                self._announce(freeze)
            return True
        past = self._past.get(job_id)
        if past is not None and (past.attempt, past.iteration) == (attempt, iteration):
            return True
        # An earlier process may have frozen this iteration and written its tree.
        plan = rings[0].session.plan if rings else None
        return plan is not None and self._writer.is_written(job_id, attempt, iteration, plan)

    def _announce(self, freeze: OpenFreeze) -> None:
        """Announce a freeze that has begun or has become part of another one, in the log and the
        status, to the coordinator and to the ranks.
        """
        record = freeze.record
        cause = record.causes[0]
        self._note(record, "")
        begun_s = freeze.begun_s
        self._past[record.job_id] = PastFreeze(record.attempt, record.iteration, begun_s)
        self.recent.add(make_job_freeze(record))
        self._report()
        text = f"the black box is frozen: {describe_cause(cause)}"
        _logger.warning("job %s: %s", record.job_id, text)
        notice = FreezeNotice(record.iteration, text, wants_stacks=cause.kind in _STACK_KINDS)
        for session in self._list_sessions(record):
            session.notify_freeze(notice)

    def _collect_facts(self, order: FreezeOrder, rings: list[StepRing]) -> FreezeFacts:
        past = self._past.get(order.job_id)
        with self.rings.lock:
            steps, rows = sum(map(len, rings)), sum(ring.row_count for ring in rings)
            tensors = sum(len(ring.tensors) for ring in rings)
            tensor_bytes = sum(ring.tensors.element_bytes for ring in rings)
        return FreezeFacts(
            rings[0].session.plan.black_box if rings else BlackBoxSettings(),
            order.iteration,
            steps=steps,
            tree_bytes=compute_tree_bytes(rows, tensors, tensor_bytes),
            last_iteration=past.iteration if past else None,
            last_s=past.begun_s if past else 0.0,
            last_root=past.root if past else "",
        )

    def _add_sizes(self, facts: FreezeFacts, order: FreezeOrder, ring: StepRing) -> FreezeFacts:
        root = ring.session.storage.tree.root
        return dataclasses.replace(
            facts,
            frozen_bytes=measure_frozen_trees(root),
            shortage=self._limits.find_shortage(root, order.job_id, facts.tree_bytes),
        )

    def _begin(self, order: FreezeOrder, rings: list[StepRing]) -> None:
        """Write what the rings have to a raw file, and notify the ranks; OSError when that is
        impossible.
        """
        first = rings[0].session
        record = FreezeRecord(
            order.job_id,
            order.attempt,
            order.iteration,
            self._host,
            first.request.world_size,
            self._find_free_time_us(order.job_id),
            (order.cause,),
        )
        settings, now_s = first.plan.black_box, time.monotonic()
        record, raw = self._keep(record)
        median_s = max(ring.median_step_s for ring in rings)
        freeze = self._open[order.job_id] = OpenFreeze(
            record,
            raw,
            now_s,
            now_s + decisions.GATHER_S,
            now_s + decisions.compute_wait_s(settings, median_s),
            order.iteration + settings.post_steps,
            [order],
        )
        self._announce(freeze)

    def _find_free_time_us(self, job_id: str) -> int:
        """Return the present time in microseconds, or the next microsecond at which no freeze of
        the job began.

        The time identifies a freeze among those of an agent, even if the clock was set back.
        """
        now_us = read_wall_clock_us()
        while (job_id, now_us) in self._statuses:
            now_us += 1
        return now_us

    def _keep(
        self, record: FreezeRecord, before: Path | None = None, *, takes: bool = False
    ) -> tuple[FreezeRecord, Path]:
        """Write the raw file of a freeze, replacing the file `before`; with `takes` the written
        steps are removed from the rings.
        """
        sessions = self._registry.list_sessions()
        with self.rings.lock:
            rings, reach = (
                self._select(record),
                self.recent.find_reach(make_job_freeze(record).key),
            )
            record, frozen = describe_rings(record, rings, sessions, reach), take_rings(rings)
        path = self._raw.write(record, frozen, before)
        if takes:
            with self.rings.lock:
                for ring, taken in zip(rings, frozen, strict=True):
                    tensors = sum(map(len, taken.tensors.values()))
                    self.rings.dropped_tensors += ring.forget(taken.steps, tensors)
        return record, path

    def _close_complete(self) -> None:
        """Complete the raw files of the freezes whose wait is over."""
        # A cause that was submitted just now still belongs to the freeze that is under way.
        with self._changed:
            asked = {order.job_id for order in self._orders}
        for job_id, freeze in list(self._open.items()):
            if job_id in asked or not self._is_complete(freeze):
                continue
            if self._select(freeze.record):
                try:
                    freeze.record, freeze.raw = self._keep(freeze.record, freeze.raw, takes=True)
                except OSError as error:
                    _logger.error("job %s: its last steps are not kept: %s", job_id, error)
            self._backlog.add(freeze.raw, freeze.orders)
            with self._changed:
                del self._open[job_id]

    def _write_due(self) -> None:
        """Write the trees of raw files, and answer the requests that wait for them."""
        for written in self._backlog.write_due():
            record, root = written.record, written.root
            self._counters.add("rankdump_agent_frozen_trees_total")
            about = {"job": record.job_id, "iteration": record.iteration, "root": root}
            self._audit("frozen", {**about, "why": record.causes[0].kind.value})
            self._note(record, root)
            past = self._past.get(record.job_id)
            if past is not None and past.iteration == record.iteration:
                self._past[record.job_id] = dataclasses.replace(past, root=root)
            text = f"the black box of iteration {record.iteration} is in {root}"
            report = make_fault_report(root, [record])
            bad = report.first_bad_value
            first = f"; {describe_bad_value(bad, bad.tensor.op_name)}" if bad else ""
            first += "".join(f"; {call.describe()}" for call in report.standing_calls[:1])
            _logger.warning("job %s: %s (rankdump faults)%s", record.job_id, text, first)
            for session in self._list_sessions(record):
                session.warn(text)
            notes, first_cause = list_notes(record), record.causes[0].identity
            for order in written.orders:
                since = f"its freeze at iteration {record.iteration} was under way"
                own = notes if order.cause.identity == first_cause else (since, *notes)
                order.answer.set_result(FreezeAnswer((root,), own))

    def _note(self, record: FreezeRecord, root: str) -> None:
        """Add a freeze to the status."""
        cause = record.causes[0]
        with self._changed:
            key = record.job_id, record.frozen_us
            self._statuses[key] = FreezeStatus(
                record.job_id,
                record.iteration,
                cause.kind.value,
                describe_cause(cause),
                root,
                record.frozen_us,
            )
            while len(self._statuses) > MAX_REMEMBERED_FREEZES:
                del self._statuses[next(iter(self._statuses))]

    def _watch_ranks(self, *, dead_only: bool = False) -> None:
        """Submit a cause for each rank that is gone or makes no steps."""
        for ring in self.rings.list_rings():
            request = ring.session.request
            cause = self._find_loss(ring) or (None if dead_only else self._find_silence(ring))
            key = request.session_id, cause.kind if cause else FaultKind.LOST_RANK
            if cause is not None and self._noted.get(key) != ring.finished_steps:
                self._noted[key] = ring.finished_steps
                self.submit(FreezeOrder(request.job_id, request.attempt, cause))

    def _find_loss(self, ring: StepRing) -> FrozenCause | None:
        session, now_s = ring.session, time.monotonic()
        session_id = session.request.session_id
        if session.closed or not session.has_ended:
            self._lost_since_s.pop(session_id, None)
            return None
        since_s = now_s - self._lost_since_s.setdefault(session_id, now_s)
        is_dead = decisions.is_dead(since_s, is_process_gone=session.is_process_gone)
        return make_loss_cause(ring, read_wall_clock_us()) if is_dead else None

    def _find_silence(self, ring: StepRing) -> FrozenCause | None:
        now_s = time.monotonic()
        ring.note_frames(ring.session.acknowledged, now_s)
        since_s = now_s - ring.active_s
        if ring.session.has_ended or not decisions.is_silent(
            since_s, ring.median_step_s, ring.interval_count, ring.longest_pause_s
        ):
            return None
        return make_silence_cause(ring, since_s, read_wall_clock_us())

    def _discard_rings(self) -> None:
        """Remove the rings of jobs that have ended, and of sessions that were removed."""
        rings = self.rings.list_rings()
        busy = {*self._open, *(order.job_id for order in self._orders)}
        going = {r.session.request.job_id for r in rings if not r.session.closed}
        for ring in rings:
            request = ring.session.request
            is_known = self._registry.find(request.session_id) is ring.session
            if request.job_id not in busy and (request.job_id not in going or not is_known):
                self.rings.discard(request.session_id)
                self._lost_since_s.pop(request.session_id, None)
                for kind in (FaultKind.LOST_RANK, FaultKind.NO_STEP):
                    self._noted.pop((request.session_id, kind), None)
