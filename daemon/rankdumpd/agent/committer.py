"""The one thread that commits: a batch of frames, one transaction, then effects and answers."""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rankdump.contract.errors import UnavailableError
from rankdumpd.agent.budget import Budget
from rankdumpd.agent.effects import Effects
from rankdumpd.agent.ledger import Ledger
from rankdumpd.agent.metered import of_frames
from rankdumpd.agent.registry import Registry
from rankdumpd.agent.sessions import Session
from rankdumpd.agent.settle import Done, Settler, Share
from rankdumpd.agent.usage import Taken, Usage
from rankdumpd.agent.values import Outcome
from rankdumpd.logs import about
from rankdumpd.meters import Meters

MAX_BATCH = 4096
TICK_S = 1.0
"""Between two looks for what is to be tried again, or may be forgotten."""
FRAME_COST_BYTES = 1024
"""What a frame occupies besides its tensor."""

_log = logging.getLogger(__name__)


def cost_bytes(item_bytes: int) -> int:
    """Return what a frame with that many bytes occupies until it is committed."""
    return item_bytes + FRAME_COST_BYTES


@dataclass(slots=True)
class _Batch:
    """What is committed at once, and what it occupies."""

    frames: list[Done] = field(default_factory=list["Done"])
    cost: int = 0


class Committer:
    """Takes finished frames from any thread; nothing ends it but `stop`."""

    def __init__(
        self,
        ledger: Ledger,
        registry: Registry,
        effects: Effects,
        budget: Budget,
        *,
        meters: Meters,
        usage: Usage | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger, self._registry, self._effects = ledger, registry, effects
        self._budget, self._meters, self._clock = budget, meters, clock
        self._usage = usage or Usage()
        self._done: queue.SimpleQueue[tuple[Sequence[Done], int] | None] = queue.SimpleQueue()
        self._unfinished: deque[Session] = deque()
        """Sessions with effects that take their time; each counts as a frame under way."""
        self._stopping = threading.Event()
        self._settler = Settler(ledger, registry, self._stopping, meters)
        self._looked_s = clock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to work."""
        self._thread = threading.Thread(target=self._run, name="rankdumpd-committer")
        self._thread.start()

    def submit(self, frames: Sequence[Done], cost: int) -> None:
        """Hand over frames with what they occupy together; never waits."""
        self._done.put((frames, cost))

    def take(self, outcomes: Sequence[Outcome]) -> None:
        """Hand over records that were written or dropped; never waits."""
        self.submit(outcomes, sum(cost_bytes(outcome.head.byte_count) for outcome in outcomes))

    def findings(self) -> list[str]:
        """Return why nothing is accounted for at present, a sentence; none when all is."""
        problem = self._settler.problem or self._ledger.problem
        return [f"the ledger cannot be written, and ranks wait: {problem}"] if problem else []

    def fault(self) -> str:
        """Say that the thread has died."""
        alive = self._thread is None or self._thread.is_alive()
        return "" if alive else "the thread that commits is dead"

    def stop(self, timeout_s: float = 60.0) -> bool:
        """Commit what was submitted, give up where the disk refuses; return whether the thread has
        ended by then.
        """
        self._stopping.set()
        if self._thread:
            self._done.put(None)
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def _run(self) -> None:
        running = True
        while running:
            batch, running = self._batch(wait=not self._unfinished)
            if batch.frames:
                self._settle(batch)
            # What is left when the end comes is done by the next process.
            if running and self._unfinished:
                self._unfinished.rotate(-1)
                self._apply(self._unfinished[-1])
            if running and self._clock() - self._looked_s >= TICK_S:
                self._look()
                self._looked_s = self._clock()

    def _batch(self, *, wait: bool) -> tuple[_Batch, bool]:
        batch = _Batch()
        try:
            item = self._done.get(timeout=TICK_S) if wait else self._done.get_nowait()
        except queue.Empty:
            return batch, True
        while item is not None:
            frames, cost = item
            batch.frames += frames
            batch.cost += cost
            if len(batch.frames) >= MAX_BATCH or self._done.empty():
                return batch, True
            item = self._done.get()
        return batch, False

    def _settle(self, batch: _Batch) -> None:
        try:
            for shares in self._settler.entered(batch.frames):
                for session, share in shares.items():
                    self._take_note(session, share)
        except UnavailableError as error:
            # This process is about to end; the next one hears of them again.
            _log.error("%d frames are left: %s", len(batch.frames), error)
        except Exception:
            # A fault in one batch must not silence the acknowledgements of all others.
            _log.exception("a batch of %d frames was not settled", len(batch.frames))
        finally:
            self._budget.give(batch.cost, items=len(batch.frames))

    def _take_note(self, session: Session, share: Share) -> None:
        try:
            session.committed(share.outcomes, share.judged, share.declared)
        except Exception as error:
            request = session.request
            _log.exception("session %s", request.session_id, extra=about(request))
            session.unclaim(share.sequences, f"its frames were not counted: {error!r}")
        else:
            if share.outcomes or share.judged:
                self._meters.add_all(of_frames(share.outcomes, share.judged))
            stored = sum(outcome.bytes_stored for outcome in share.outcomes)
            root = str(session.outlet.tree.root)
            self._usage.add(Taken(session.request.job_id, root, stored))
            self._apply(session)

    def _apply(self, session: Session) -> None:
        done = True
        try:
            done = self._effects.apply_due(session)
        except Exception as error:
            request = session.request
            _log.exception(
                "session %s of rank %d", request.session_id, request.rank, extra=about(request)
            )
            session.trouble(f"rank {request.rank}: a declaration had no effect: {error}")
        if done and session in self._unfinished:
            self._unfinished.remove(session)
            self._budget.give(0)
        elif not done and session not in self._unfinished:
            self._unfinished.append(session)
            self._budget.hold()

    def _look(self) -> None:
        """Try again what failed; let the ledger forget, as long as nothing else is to be done."""
        sessions = self._registry.all()
        for session in self._effects.to_try_again(sessions):
            self._apply(session)
        self._registry.let_go()
        try:
            if self._ledger.problem:
                self._ledger.probe()
            self._ledger.left(each.request.session_id for each in sessions if each.over)
            while self._done.empty() and not self._stopping.is_set() and self._ledger.tidy():
                pass
        except (sqlite3.Error, UnavailableError) as error:
            _log.warning("the ledger is not tidied: %s", error)
