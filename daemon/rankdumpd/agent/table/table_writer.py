"""Thread that writes the rows of finished iterations to the table of statistics of their tree, in
windows, through a process of idle priority.

The ledger has a row for each manifest until the rows of the manifest are written. So a crash at any
time loses none, and a repetition finds the rows that are in the table already.
"""

from __future__ import annotations

import importlib.util
import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rankdump._core.backoff import RetrySchedule
from rankdump._core.manifest import make_manifest_name
from rankdump._core.plan import DumpPlan
from rankdump._core.session_protocol import SessionRequest
from rankdump._layout.tree_layouts import LAYOUTS
from rankdump._layout.tree_paths import MANIFEST_FOLDER
from rankdump.errors import RankdumpError
from rankdumpd.agent.ledger.agent_ledger import AgentLedger
from rankdumpd.agent.ledger.deferred_work import UnindexedManifest, UnindexedSession
from rankdumpd.agent.limits.admission import compute_floor_bytes
from rankdumpd.agent.limits.resource_limits import ResourceLimits
from rankdumpd.agent.records import read_wall_clock_us
from rankdumpd.agent.session.registry import (
    UNUSABLE_ROW_ERRORS,
    SessionRegistry,
    read_stored_session,
)
from rankdumpd.agent.storage.tree_lock import TreeLock
from rankdumpd.agent.table.table_process import TableAnswer, TableProcess, TableRequest
from rankdumpd.server import state_files
from rankdumpd.server.background_thread import BackgroundThread
from rankdumpd.server.metrics import MetricCounters

CHECK_INTERVAL_S = 1.0
IDLE_GRACE_S = 1.0
"""Seconds that a process of idle priority may still take when all rows are to be written."""
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0
MAX_MANIFESTS = 16_384
"""Largest number of manifests in one request."""
_REQUIRED_MODULE = "pyarrow"

_logger = logging.getLogger(__name__)


WINDOW_RECORDS = 125_000
"""Records of a full window, which are a few megabytes of Parquet."""
DISK_FULL = "disk_full"
"""The only reason to wait that becomes a finding, because all others end without help."""
WINDOW_AGE_S = 60.0
"""Longest time in seconds for which rows wait while their job is running."""


class WaitingRows(NamedTuple):
    """Rows of a tree that are not in its table yet."""

    records: int
    since_us: int
    """Time at which the oldest manifest was written, in microseconds since the epoch."""
    is_job_over: bool
    """Whether no rank writes to the tree any more."""
    is_disk_full: bool
    """Whether tensors are dropped because the disk has too little space."""


class WindowDecision(NamedTuple):
    """Whether the rows are written now, and the reason in either case."""

    is_due: bool
    reason: str


def decide_window(rows: WaitingRows, *, now_us: int, is_finishing: bool) -> WindowDecision:
    """Decide whether the rows of a tree are written now; `now_us` is in microseconds since the
    epoch.

    `is_finishing` means that no later process of the agent would write them.

    >>> decide_window(WaitingRows(10, 0, False, False), now_us=30_000_000, is_finishing=False)
    WindowDecision(is_due=False, reason='window_open')
    """
    if rows.is_disk_full:
        return WindowDecision(False, DISK_FULL)
    if rows.records >= WINDOW_RECORDS:
        return WindowDecision(True, "window_full")
    if is_finishing or rows.is_job_over:
        return WindowDecision(True, "job_over")
    if now_us - rows.since_us >= WINDOW_AGE_S * 1e6:
        return WindowDecision(True, "window_old")
    return WindowDecision(False, "window_open")


@dataclass(frozen=True, slots=True)
class SessionPlace:
    """Location of the manifests of a session."""

    request: SessionRequest
    plan: DumpPlan

    @property
    def root(self) -> str:
        """Root of the tree."""
        return self.plan.output.root

    def find_manifest(self, session_id: str, iteration: int) -> tuple[str, int, int]:
        """Return the path of a manifest below the root, its rank and iteration."""
        folder = LAYOUTS[self.plan.output.layout].rank_folder(self.request.rank)
        name = make_manifest_name(iteration, session_id)
        return f"{folder}/{MANIFEST_FOLDER}/{name}", self.request.rank, iteration


@dataclass(slots=True)
class WaitingTree:
    """A tree with rows that are not in its table yet."""

    place: SessionPlace
    """Location of the manifests of one of its sessions."""
    sessions: list[UnindexedSession] = field(default_factory=list[UnindexedSession])


class TableWriter:
    """Writes tables in a thread of its own; safe to use from several threads."""

    def __init__(
        self,
        ledger: AgentLedger,
        registry: SessionRegistry,
        limits: ResourceLimits,
        *,
        is_wanted: bool,
        counters: MetricCounters,
        now_us: Callable[[], int] = read_wall_clock_us,
    ) -> None:
        """Without `is_wanted`, or without pyarrow, the writer does nothing."""
        self._ledger, self._registry, self._limits = ledger, registry, limits
        self._is_wanted, self._counters, self._now_us = is_wanted, counters, now_us
        self._thread = BackgroundThread(self._run, "rankdumpd-table")
        self._retries = RetrySchedule(FIRST_RETRY_S, LAST_RETRY_S)
        self._problems: dict[str, str] = {}
        """Why rows wait longer than they should, by root of the tree; under an empty root for all
        trees.
        """
        self._places: dict[str, SessionPlace | None] = {}
        """Locations of the manifests by session id; None for a session that can have no rows."""
        self._changed = threading.Condition()
        self._work = threading.Event()
        self._process: TableProcess | None = None
        self._slow_process: TableProcess | None = None
        """The process, if its priority is idle."""
        self._is_finishing = self._is_idle = self._is_replaced = False
        self._written = 0

    def start(self) -> None:
        """Start the thread, where pyarrow is installed."""
        if not self._is_wanted:
            return
        if importlib.util.find_spec(_REQUIRED_MODULE) is None:
            _logger.info(
                "no table of statistics is written: pyarrow is not installed (rankdump[table])"
            )
            return
        self._ledger.unindexed.is_kept = True
        self._thread.start()

    @property
    def finished_count(self) -> int:
        """Number of times that rows of a tree were written."""
        return self._written

    def finish(self, timeout_s: float) -> int:
        """Write all rows, for at most `timeout_s`; return 1 if some rows are left, else 0.

        On a busy host, a process of idle priority may get no core all the time, so it is replaced.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            self._is_idle, self._is_finishing = False, True
            self._work.set()
            if self._slow_process is not None:
                self._changed.wait_for(self._is_finished, min(timeout_s, IDLE_GRACE_S))
            if self._slow_process is not None:
                self._is_replaced = True
                self._slow_process.kill()
            while not self._is_finished():
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return 1
                self._changed.wait(min(left_s, CHECK_INTERVAL_S))
        return 0

    def _is_finished(self) -> bool:
        return self._is_idle or not self._thread.is_running

    def stop(self, timeout_s: float = 60.0) -> bool:
        """Leave all other rows to the next process; return whether the thread has ended."""
        self._thread.request_stop()
        self._work.set()
        with self._changed:
            if self._process is not None:
                self._process.kill()
        return self._thread.join(timeout_s)

    def findings(self) -> list[str]:
        """Return why rows are not written, one sentence for each tree."""
        problems = [*self._problems.values(), *filter(None, [self._thread.fault()])]
        return [f"rows of the table of statistics wait: {each}" for each in problems]

    def write_due(self) -> bool:
        """Write the rows of trees whose window is due; return whether there were any.

        Errors of the ledger are raised.
        """
        done = False
        trees = self._list_trees()
        for root in {*self._problems}.difference({"", *(tree.place.root for tree in trees)}):
            self._note_success(root)
        for tree in trees:
            root = tree.place.root
            decision = decide_window(
                self._measure(tree), now_us=self._now_us(), is_finishing=self._is_finishing
            )
            if decision.reason == DISK_FULL:
                self._note_problem(root, f"{root}: the disk has less space than agents leave free")
            elif decision.is_due and self._retries.is_due(root, now_s=time.monotonic()):
                done = self._write_tree(tree) or done
        return done

    def _run(self) -> None:
        while not self._thread.is_stopping:
            self._work.clear()
            was_finishing, done = self._is_finishing, False
            try:
                done = self.write_due()
                self._note_success("")
            except (OSError, sqlite3.Error, RankdumpError) as error:
                self._note_problem("", state_files.describe_error(error))
            with self._changed:
                self._is_idle = was_finishing and not done
                self._changed.notify_all()
            if not done:
                self._work.wait(CHECK_INTERVAL_S)

    def _list_trees(self) -> list[WaitingTree]:
        """Return the trees with waiting rows; delete the ledger rows of sessions that can have no
        table.
        """
        trees: dict[str, WaitingTree] = {}
        places: dict[str, SessionPlace | None] = {}
        for each in self._ledger.unindexed.list_sessions():
            known = each.session_id in self._places
            place = self._places[each.session_id] if known else self._find_place(each.session_id)
            places[each.session_id] = place
            if place is None:
                self._drop(each)
            else:
                trees.setdefault(place.root, WaitingTree(place)).sessions.append(each)
        self._places = places
        return list(trees.values())

    def _find_place(self, session_id: str) -> SessionPlace | None:
        """Return the location of a session's manifests; None for a session that the ledger does not
        know.
        """
        try:
            return SessionPlace(*read_stored_session(self._ledger, session_id))
        except UNUSABLE_ROW_ERRORS:
            return None

    def _drop(self, session: UnindexedSession) -> None:
        while rows := self._ledger.unindexed.list_manifests(session.session_id, MAX_MANIFESTS):
            self._ledger.unindexed.delete(rows)

    def _measure(self, tree: WaitingTree) -> WaitingRows:
        root = tree.place.root
        usage = self._limits.usage_at(Path(root), tree.place.request.job_id)
        return WaitingRows(
            sum(each.records for each in tree.sessions),
            min(each.since_us for each in tree.sessions),
            is_job_over=all(
                each.over
                for each in self._registry.list_sessions()
                if str(each.storage.tree.root) == root
            ),
            is_disk_full=usage.space.free_bytes < compute_floor_bytes(usage.policy, usage.space),
        )

    def _write_tree(self, tree: WaitingTree) -> bool:
        """Write the oldest rows of a tree; return whether to go on at once."""
        request, rows = self._make_request(tree)
        answer, root = self._ask(request), tree.place.root
        with self._changed:
            was_replaced, self._is_replaced = self._is_replaced, False
        if answer.error and was_replaced:
            return True  # the next process has the priority of the agent
        if answer.error:
            self._retries.postpone(root, now_s=time.monotonic())
            self._note_problem(root, f"{root}: {answer.error}")
            return False
        for problem in answer.problems:
            _logger.error("table of statistics: %s", problem)
        self._ledger.unindexed.delete(rows)
        self._written += 1
        self._counters.add("rankdump_agent_table_rows_total", answer.rows)
        self._note_success(root)
        return True

    def _make_request(self, tree: WaitingTree) -> tuple[TableRequest, list[UnindexedManifest]]:
        """Return a request for the oldest rows of a tree, and the ledger rows that it covers."""
        rows: list[UnindexedManifest] = []
        manifests: list[tuple[str, int, int]] = []
        records = 0
        for session in tree.sessions:
            place = self._places[session.session_id] or tree.place
            for each in self._ledger.unindexed.list_manifests(session.session_id, MAX_MANIFESTS):
                if records >= 2 * WINDOW_RECORDS or len(rows) >= MAX_MANIFESTS:
                    break
                manifests.append(place.find_manifest(session.session_id, each.iteration))
                rows.append(each)
                records += each.records
        plan = tree.place.plan
        output, is_synced = plan.output, plan.delivery.durability == "synced"
        request = TableRequest(
            output.root, output.file_mode, output.folder_mode, is_synced, manifests
        )
        return request, rows

    def _ask(self, request: TableRequest) -> TableAnswer:
        """Let a process write rows, unless the tree is being repaired."""
        lock = TreeLock(request.open_tree())
        try:
            lock.acquire(make=False)
            with self._changed:
                if self._thread.is_stopping:
                    return TableAnswer(error="the agent is stopping")
                is_idle = not self._is_finishing
                process = self._process = TableProcess(is_idle=is_idle)
                self._slow_process = process if is_idle else None
            try:
                return process.write(request)
            finally:
                process.close()
                with self._changed:
                    self._process = self._slow_process = None
        except OSError as error:
            return TableAnswer(error=error.strerror or str(error))
        finally:
            lock.release()

    def _note_problem(self, root: str, problem: str) -> None:
        if self._problems.get(root) != problem and not self._thread.is_stopping:
            _logger.error("rows of the table of statistics wait: %s", problem)
            self._problems = {**self._problems, root: problem}

    def _note_success(self, root: str) -> None:
        self._retries.forget(root)
        self._problems = {name: each for name, each in self._problems.items() if name != root}
