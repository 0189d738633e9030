"""One rank's session: its identity, its committed and acknowledged frames, the mailbox of its
stream, its ring, its status, and the preparation of its tree. The arithmetic of acknowledgements is
pure.
"""

from __future__ import annotations

import dataclasses
import secrets
import socket
import threading
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Protocol

from rankdump._core import selection
from rankdump._core.black_box import FreezeNotice
from rankdump._core.job_control import ControlOrder, describe_operators
from rankdump._core.number_ranges import ranges
from rankdump._core.plan import DumpPlan
from rankdump._core.session_protocol import (
    Acknowledgement,
    ChangedPlan,
    IterationEnd,
    SessionEnd,
    SessionRequest,
)
from rankdump._core.status import IterationStatus, SessionState, SessionStatus
from rankdump._core.tree_session import DaemonAddresses, TreeSession, number_attempt
from rankdump.errors import RankdumpError, UnavailableError
from rankdumpd.agent.declarations import reread_metadata_frame
from rankdumpd.agent.ledger.agent_ledger import AgentLedger
from rankdumpd.agent.ledger.rows import LedgerSessionRow
from rankdumpd.agent.records import (
    BaselineProblem,
    FileDescriptor,
    MetadataFrame,
    QuietRank,
    RecordOutcome,
    StatisticRowsResult,
)
from rankdumpd.agent.session import balance
from rankdumpd.agent.session.balance import SessionTallies
from rankdumpd.agent.session.pending_metadata import PendingMetadata, ProgramOrder
from rankdumpd.agent.session.rank_process import (
    has_process_ended,
    open_process,
    read_process_end,
)
from rankdumpd.agent.storage import rank_files
from rankdumpd.agent.storage.graph_files import GraphAssembler
from rankdumpd.agent.storage.session_storage import (
    PlanHistory,
    SessionStorage,
    make_session_storage,
)
from rankdumpd.server import state_files

MAX_RUNNING_NOTES = 16
"""Largest number of watch-rule notes in the status of a running session; its end contains more."""


class StreamMailbox:
    """Answers that are due on one stream; many threads add answers, one thread takes them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: Acknowledgement = Acknowledgement(0)
        """The next answer."""
        self._last: int | None = None
        self._error: RankdumpError | None = None
        self.at_rest = False
        """Whether all received data is handled and no record is incomplete; set by the reader."""

    def acknowledge(self, sequence: int) -> None:
        """Acknowledge all frames up to this sequence number."""
        with self._changed:
            self._update(sequence=max(self._due.sequence, sequence))

    def warn(self, text: str) -> None:
        """Send a warning, which the rank logs."""
        with self._changed:
            self._update(warnings=(*self._due.warnings, text))

    def drain(self) -> None:
        """Announce that the agent is about to stop."""
        self._update(draining=True)

    def offer_slab(self) -> None:
        """Announce that a slab is ready; the rank can reopen the session to use it."""
        self._update(slab_ready=True)

    def freeze(self, notice: FreezeNotice) -> None:
        """Notify the rank that the black box was frozen; a later notice replaces an unsent one."""
        self._update(freeze=notice)

    def send_order(self, order: ControlOrder) -> None:
        """Send an order that controls the job."""
        with self._changed:
            self._update(orders=(*self._due.orders, order))

    def end(self, reason: str) -> None:
        """End the stream with a retryable error."""
        self.fail(UnavailableError(reason))

    def fail(self, error: RankdumpError) -> None:
        """End the stream with an error; only the first error counts."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def complete(self, last_sequence: int) -> None:
        """End the stream once this sequence number is acknowledged, because no more frames will
        arrive.
        """
        with self._changed:
            self._last = last_sequence
            self._changed.notify_all()

    def answers(self) -> Iterator[Acknowledgement]:
        """Yield acknowledgements until the stream is complete; raise the error that ends the
        stream.
        """
        sent: Acknowledgement = Acknowledgement(0)
        while True:
            with self._changed:
                self._changed.wait_for(lambda sent=sent: self._due != sent or self._is_over())
                news, error = self._due, self._error
                self._due = rest = dataclasses.replace(news, warnings=(), freeze=None, orders=())
            if news != sent:
                sent = rest
                yield news
            elif error:
                raise error
            else:
                return

    def _update(self, **fields: Any) -> None:
        with self._changed:
            self._due = dataclasses.replace(self._due, **fields)
            self._changed.notify_all()

    def _is_over(self) -> bool:
        is_complete = self._last is not None and self._due.sequence >= self._last
        return self._error is not None or is_complete


class SessionRing(Protocol):
    """The part of a ring that its session needs."""

    def acknowledge(self, sequence: int) -> None:
        """Release the entries of all frames up to this sequence number."""
        ...

    def abandon(self, reason: str) -> None:
        """Stop using the ring; the rank resends what is not acknowledged."""
        ...


def make_session_status(
    request: SessionRequest,
    plan: DumpPlan,
    state: SessionState,
    end: SessionEnd,
    changed_in: int | None = None,
) -> SessionStatus:
    """Return the identity and the state of a session; `end` is empty until the rank ends the
    session.
    """
    return SessionStatus(
        request.job_id,
        request.session_id,
        request.rank,
        request.world_size,
        request.device,
        request.host,
        request.pid,
        state=state,
        excluded=selection.decide_device(plan, request.device).reason,
        iterations_seen=end.iterations_seen,
        notes=end.notes,
        framework=request.framework,
        device_target=request.device_target,
        selected=plan.selection.iterations.text,
        attempt=request.attempt,
        is_elastic=request.is_elastic,
        started_us=request.started_us,
        raised_in=end.raised_in,
        operators=describe_operators(plan.selection),
        saved_data=plan.content.saved,
        changed_in=changed_in,
    )


class CommitProgress:
    """The watermark of a session, and the committed sequence numbers above it."""

    def __init__(self, watermark: int = 0, beyond: Iterable[int] = ()) -> None:
        self.watermark = watermark
        """Every frame up to this sequence number is committed."""
        self._beyond = {number for number in beyond if number > watermark}
        self._advance()

    @property
    def highest(self) -> int:
        """The highest committed sequence number."""
        return max(self._beyond, default=self.watermark)

    def __contains__(self, sequence: int) -> bool:
        return sequence <= self.watermark or sequence in self._beyond

    def exclude_committed(self, sequences: Iterable[int]) -> set[int]:
        """Return those of the sequence numbers that are not committed."""
        watermark, beyond = self.watermark, self._beyond
        return {number for number in sequences if number > watermark and number not in beyond}

    def add(self, sequences: Iterable[int]) -> None:
        """Mark sequence numbers as committed, in any order; repetitions change nothing."""
        self._beyond.update(number for number in sequences if number > self.watermark)
        self._advance()

    def _advance(self) -> None:
        while self.watermark + 1 in self._beyond:
            self.watermark += 1
            self._beyond.remove(self.watermark)


class RankSession:
    """One rank's session; safe to use from several threads."""

    def __init__(
        self,
        request: SessionRequest,
        plan: DumpPlan,
        daemons: DaemonAddresses = DaemonAddresses(),  # noqa: B008 - it is immutable
    ) -> None:
        self.daemons = daemons
        self.plans = PlanHistory(plan, make_session_storage(request, plan))
        self.has_metadata = True
        """Whether the metadata of the rank is in the tree, or cannot be written."""
        self.restored = False
        """Whether an earlier process may have written files without committing them."""
        self.tabulated_to = 0
        """The table rows of every frame up to this sequence number are written."""
        self.pending = PendingMetadata()
        self.graphs = GraphAssembler()
        self.program = ProgramOrder()
        self.request = request
        self.token = secrets.token_bytes(16)
        self.excluded = selection.decide_device(plan, request.device).reason
        self._lock = threading.Lock()
        self._expected = True
        self._end: SessionEnd | None = None
        self._progress = CommitProgress()
        self.acknowledged = 0
        """Every frame up to this number is committed; a session end among them is also applied."""
        self._in_flight: set[int] = set()
        self._tallies = SessionTallies()
        self._findings: dict[str, None] = {}
        self._failures: dict[str, set[int]] = {}
        """Iterations by the text of a failure; empty for a failure that concerns no iteration."""
        self._baseline_problems: set[str] = set()
        """Kinds of the baseline problems that are among the findings."""
        self._warnings: dict[str, None] = {}
        self._notes: dict[tuple[str, str], str] = {}
        """Notes of watch rules, by rule and tensor, until the rank ends the session."""
        self._listener: StreamMailbox | None = None
        self._ring: SessionRing | None = None
        self._slab_waits = False
        self._process: FileDescriptor | None = None
        self._ended_by = ""
        self._process_ended = False
        """Whether the rank's process has ended and all data that it left is handled."""
        self._last_events_known = False

    def restore(self, ledger: AgentLedger, row: LedgerSessionRow) -> None:
        """Restore the state from the ledger, before any other thread uses this session."""
        session_id = self.request.session_id
        for raw in ledger.changed_plans(session_id):
            frame = reread_metadata_frame(raw, session_id)
            if isinstance(frame.declaration, ChangedPlan):
                changed = frame.declaration
                self.plans.add(frame.frame_id.sequence, changed.plan, changed.iteration)
        self._expected, self.restored = False, True
        # The end of an iteration is applied only after all earlier rows.
        self.tabulated_to = ledger.last_end(session_id)
        if self.storage.tables is not None:
            self.storage.tables.expect_existing_rows()
        if row.state is SessionState.CLOSED:
            self._end = SessionEnd(row.iterations_seen, row.notes)
        self.program = ProgramOrder(row.ordered_graphs)
        beyond = ledger.committed_beyond(session_id, row.watermark)
        self._progress = CommitProgress(row.watermark, beyond)
        self.acknowledged = self._progress.watermark
        self.pending.restore(
            reread_metadata_frame(raw, session_id) for raw in ledger.unapplied(session_id)
        )
        self._tallies.restore(ledger.counts(session_id), ledger.ends(session_id))

    @property
    def plan(self) -> DumpPlan:
        """The plan that the newest frames have."""
        return self.plans.latest.plan

    @property
    def storage(self) -> SessionStorage:
        """The parts that write files, for the newest plan."""
        return self.plans.latest.storage

    @property
    def watermark(self) -> int:
        """Every frame up to this sequence number is committed."""
        return self._progress.watermark

    @property
    def live(self) -> bool:
        """Whether a stream of the session is connected."""
        return self._listener is not None

    @property
    def idle(self) -> bool:
        """Whether no stream is connected and no frame is in flight."""
        return self._listener is None and not self._in_flight

    @property
    def closed(self) -> bool:
        """Whether the rank has ended the session, and no frame has followed."""
        return self._end is not None

    @property
    def has_ended(self) -> bool:
        """Whether the rank has ended the session, or is gone."""
        return self._find_state() is not SessionState.OPEN

    @property
    def over(self) -> bool:
        """Whether no work is left to be done for the session."""
        done = self._ring is None and self.pending.is_complete
        return self.idle and done and self.has_ended

    @property
    def quiet_rank(self) -> QuietRank | None:
        """The rank with its watermark, when no frame is in flight; otherwise None.

        A rank that may reconnect, or that ended its session, is not quiet.
        """
        with self._lock:
            listener, busy = self._listener, bool(self._in_flight) or self.closed
            rest = self._process_ended if listener is None else listener.at_rest
            if busy or not rest:
                return None
            request = self.request
            return QuietRank(request.job_id, request.rank, request.session_id, self.watermark)

    def is_known(self, sequence: int) -> bool:
        """Return whether a frame arrived completely before, committed or not.

        Called for every frame without the lock, so only `claim_frames` is reliable.
        """
        return sequence in self._progress or sequence in self._in_flight

    def find_free_number(self) -> int:
        """Return the sequence number after all frames that have arrived."""
        with self._lock:
            return max(self._progress.highest, *self._in_flight, 0) + 1

    def claim_frames(self, sequences: set[int]) -> set[int]:
        """Claim frames that arrived completely; return the numbers that were not claimed before."""
        with self._lock:
            new = self._progress.exclude_committed(sequences) - self._in_flight
            if new:
                self._in_flight.update(new)
                self._end = None
            return new

    def release_frames(self, sequences: Iterable[int], reason: str) -> None:
        """Release frames that could not be committed, so that the rank resends them."""
        with self._lock:
            self._in_flight.difference_update(sequences)
            listener, ring = self._listener, self._ring
        if ring:
            ring.abandon(reason)
        if listener:
            listener.end(reason)

    def count_committed(
        self,
        outcomes: Collection[RecordOutcome],
        row_results: Collection[StatisticRowsResult],
        declared: Collection[MetadataFrame],
    ) -> None:
        """Count frames that have just been committed."""
        with self._lock:
            self._tallies.add(outcomes, row_results)
            settled = [each.frame_id.sequence for each in (*outcomes, *row_results, *declared)]
            self.pending.add(declared)
            self._progress.add(settled)
            self._in_flight.difference_update(settled)

    def adjust_stored_bytes(self, iteration: int, more_bytes: int) -> None:
        """Add a change in size of stored tensors to an iteration."""
        with self._lock:
            self._tallies.adjust_stored_bytes(iteration, more_bytes)

    def is_first_end(self, declared: MetadataFrame, end: IterationEnd) -> bool:
        """Return whether the end of an iteration was not counted yet."""
        with self._lock:
            return self._tallies.is_first_end(end, declared.frame_id.sequence)

    def end_iteration(self, declared: MetadataFrame, end: IterationEnd) -> IterationStatus:
        """Complete an iteration, for the first time or again; return its balance."""
        with self._lock:
            return self._tallies.end(self.request, end, declared.frame_id.sequence)

    def close_by_rank(self, end: SessionEnd) -> None:
        """Close the session, because the rank has nothing more to send."""
        with self._lock:
            self._end, self._process = end, None

    def add_finding(self, sentence: str) -> bool:
        """Remember a finding about this session; return whether the finding is new."""
        with self._lock:
            new = sentence not in self._findings
            self._findings.setdefault(sentence)
            return new

    def add_failure(self, what: str, iteration: int | None = None) -> bool:
        """Remember a failure, which may concern an iteration; return whether it is the first such
        failure.
        """
        with self._lock:
            is_new = what not in self._failures
            iterations = self._failures.setdefault(what, set())
            if iteration is not None:
                iterations.add(iteration)
            return is_new

    def add_baseline_problem(self, problem: BaselineProblem) -> None:
        """Remember that tensors are stored because the baseline cannot be used for them.

        The first problem of a kind becomes a finding, and a warning in the rank's log.
        """
        with self._lock:
            if problem.kind in self._baseline_problems:
                return
            self._baseline_problems.add(problem.kind)
        text = f"{problem.text}; tensors without a counterpart are stored"
        self.add_finding(f"rank {self.request.rank}: {text}")
        self.warn(text)

    def add_notes(self, iteration: int, notes: Iterable[str]) -> bool:
        """Remember notes of watch rules; return whether the status of the session has changed.

        Only the first note of a rule about a tensor counts.
        """
        with self._lock:
            before = len(self._notes)
            for text in notes:
                about = text.partition(": ")[0], text.rpartition(" (")[2]
                if len(self._notes) < MAX_RUNNING_NOTES:
                    self._notes.setdefault(about, f"iteration {iteration}: {text}")
            return len(self._notes) > before

    def warn(self, text: str) -> None:
        """Send a warning that the rank logs; each text is sent once."""
        with self._lock:
            listener = None if text in self._warnings else self._listener
            self._warnings[text] = None
        if listener:
            listener.warn(text)

    def notify_freeze(self, notice: FreezeNotice) -> None:
        """Notify the rank, if it is connected, that the black box was frozen."""
        listener = self._listener
        if listener:
            listener.freeze(notice)

    def send_order(self, order: ControlOrder) -> bool:
        """Send an order that controls the job; return whether the rank is connected."""
        listener = self._listener
        if listener:
            listener.send_order(order)
        return listener is not None

    def acknowledge(self) -> None:
        """Acknowledge committed frames.

        The end of the session is acknowledged when all frames before it are applied or deferred.
        Other frames need not wait for the end of their iteration, because they are in the ledger.
        """
        with self._lock:
            before = [at - 1 for at in self.pending.session_ends]
            safe = min([self._progress.watermark, *before])
            self.acknowledged = max(self.acknowledged, safe)
            listener, ring = self._listener, self._ring
        # Released before the rank is notified, because the rank then looks for free space.
        if ring:
            ring.acknowledge(self.acknowledged)
        if listener:
            listener.acknowledge(self.acknowledged)

    def attach_ring(self, ring: SessionRing | None) -> None:
        """Set the ring that is released as frames are acknowledged; None for no ring."""
        with self._lock:
            self._ring, self._slab_waits = ring, False

    def offer_slab(self) -> None:
        """Announce the slab to the rank, now or when it connects."""
        with self._lock:
            self._slab_waits, listener = True, self._listener
        if listener:
            listener.offer_slab()

    def reopen(self, request: SessionRequest) -> None:
        """Resume the session for the same rank, with a new token."""
        with self._lock:
            self.request = dataclasses.replace(request, plan_json=self.request.plan_json)
            self.token = secrets.token_bytes(16)
            self._expected = True
            self._process_ended = self._last_events_known = False
            self._process, self._ended_by = None, ""

    def connect(self, listener: StreamMailbox) -> None:
        """Connect a stream to this session; an earlier stream is ended."""
        with self._lock:
            earlier, self._listener = self._listener, listener
            if self._process is None and self.request.host == socket.gethostname():
                self._process = open_process(self.request.pid)
            warnings, slab_waits = list(self._warnings), self._slab_waits
        if earlier:
            earlier.end("the session is connected by another stream")
        # The warnings may not have arrived before the last stream broke off.
        for text in warnings:
            listener.warn(text)
        if slab_waits:
            listener.offer_slab()
        listener.acknowledge(self.acknowledged)

    def disconnect(self, listener: StreamMailbox) -> bool:
        """Note that a stream has ended; return whether it was the connected one."""
        with self._lock:
            if self._listener is not listener:
                return False
            self._listener = None
            self._expected = False
            return True

    def mark_lost(self) -> None:
        """Note that the process of the rank is gone."""
        self._expected, self._process_ended = False, True

    @property
    def is_process_gone(self) -> bool | None:
        """Whether the rank's process has ended; None where that cannot be determined."""
        process = self._process
        if self._process_ended or self._ended_by:
            return True
        return None if process is None else has_process_ended(process)

    @property
    def outlives_process(self) -> bool:
        """Whether the stream is connected although the rank's process has ended."""
        return self.live and self.is_process_gone is True

    @property
    def may_learn_end(self) -> bool:
        """Whether the session is lost, but it may still become known how its process ended."""
        lost = self._find_state() is SessionState.LOST
        return lost and self._process is not None and not self._ended_by

    def find_process_end(self) -> bool:
        """Find out how the process of a lost session ended; return whether that is known now."""
        process = self._process if self.may_learn_end else None
        ended_by = read_process_end(process) if process is not None else ""
        with self._lock:
            if ended_by and self._process is process:
                self._process, self._ended_by = None, ended_by
        return bool(ended_by)

    def release_process(self) -> None:
        """Stop waiting for the end of the process."""
        with self._lock:
            if self._find_state() is SessionState.LOST:
                self._process = None

    def confirm_last_events(self) -> None:
        """Note that all events of the rank's process are known."""
        self._last_events_known = True

    def status(self) -> SessionStatus:
        """Return the identity and the state of the session."""
        with self._lock:
            # The session end has the notes of the whole session.
            end = self._end or SessionEnd(0, tuple(self._notes.values()))
            state, latest = self._find_state(), self.plans.latest
            status = make_session_status(self.request, latest.plan, state, end, latest.iteration)
            if state is not SessionState.LOST:
                return status
            return dataclasses.replace(
                status, ended_by=self._ended_by, last_events_known=self._last_events_known
            )

    def make_tree_session(self, changed_us: int) -> TreeSession:
        """Return the content of the session's file, with `changed_us` as the time of the last
        change.
        """
        iterations = self.iterations() if self.has_ended else []
        return TreeSession(
            self.status(),
            changed_us,
            *self.daemons,
            process_us=self.request.process_us,
            unfinished=tuple(each for each in iterations if not each.complete),
        )

    def _list_failures(self) -> list[str]:
        with self._lock:
            failures = {what: tuple(found) for what, found in self._failures.items()}
        return [
            f"rank {self.request.rank}, {_name_iterations(iterations)}{what}"
            for what, iterations in failures.items()
        ]

    def _find_state(self) -> SessionState:
        if self._end:
            return SessionState.CLOSED
        if self._listener or self._expected:
            return SessionState.OPEN
        return SessionState.LOST

    def iterations(self) -> list[IterationStatus]:
        """Return the balance of every iteration of which anything has arrived, in order."""
        with self._lock:
            return self._tallies.statuses(self.request)

    def findings(self) -> list[str]:
        """Return the findings about this session."""
        return [
            *self._findings,
            *self._list_failures(),
            *filter(None, [self.pending.problem]),
            *balance.list_balance_findings(self.status(), self.iterations()),
        ]


def _name_iterations(iterations: Collection[int]) -> str:
    if not iterations:
        return ""
    return f"iteration{'s' * (len(iterations) > 1)} {ranges(iterations)}: "


def number_request(session: RankSession, request: SessionRequest) -> SessionRequest:
    """Return the request of a new session, with the number of its attempt added."""
    try:
        earlier = rank_files.read_sessions(session.storage.tree, request.rank)
    except OSError:
        earlier = []  # then only the launcher's count decides
    return dataclasses.replace(request, attempt=number_attempt(request, earlier))


def prepare_tree(session: RankSession, request: SessionRequest, now_us: int) -> None:
    """Lock the tree, and write the session's file and the rank's metadata if they are missing.

    May be repeated after an OSError.
    """
    storage = session.storage
    storage.lock.acquire()
    _create_session_file(session, request, now_us)
    if storage.layout.api_files is not None:
        storage.tree.make(
            f"{storage.layout.rank_folder(request.rank)}/{storage.layout.api_files.folder}"
        )
    else:
        rank_files.write_rank_metadata(storage.tree, request, session.plan, storage.context.profile)


def _create_session_file(session: RankSession, request: SessionRequest, now_us: int) -> None:
    """Write the file of a new session, because the number of the next attempt depends on it.

    If its folder cannot be written, tensors may still be; so only a transient error is raised.
    """
    status = make_session_status(request, session.plan, SessionState.OPEN, SessionEnd(0))
    begun = TreeSession(status, now_us, *session.daemons, process_us=request.process_us)
    try:
        rank_files.create_session_file(session.storage.tree, begun)
    except OSError as error:
        if state_files.is_transient(error):
            raise
        session.add_finding(f"rank {request.rank}: its session has no file in the tree: {error}")
