"""The one thread that commits: a batch of frames, one transaction, then effects and answers."""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from rankdumpd.agent.budget import Budget
from rankdumpd.agent.effects import Effects
from rankdumpd.agent.ledger import Ledger
from rankdumpd.agent.registry import Registry
from rankdumpd.agent.sessions import Session
from rankdumpd.agent.values import Declared, Judged, Outcome

MAX_BATCH = 4096
RETRY_S = 1.0
FRAME_COST_BYTES = 1024
"""What a frame occupies besides its tensor."""

Done: TypeAlias = "Outcome | Judged | Declared"

_log = logging.getLogger(__name__)


def cost_bytes(item_bytes: int) -> int:
    """Return what a frame with that many bytes occupies until it is committed."""
    return item_bytes + FRAME_COST_BYTES


@dataclass(slots=True)
class _Share:
    """One session's part of a batch."""

    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    judged: list[Judged] = field(default_factory=list[Judged])
    declared: list[Declared] = field(default_factory=list[Declared])


@dataclass(slots=True)
class _Batch:
    """What is committed at once, and what it occupies."""

    frames: list[Done] = field(default_factory=list["Done"])
    cost: int = 0


class Committer:
    """Takes finished frames from any thread; nothing ends it but `stop`."""

    def __init__(
        self, ledger: Ledger, registry: Registry, effects: Effects, budget: Budget
    ) -> None:
        self._ledger, self._registry, self._effects = ledger, registry, effects
        self._budget = budget
        self._done: queue.SimpleQueue[tuple[Sequence[Done], int] | None] = queue.SimpleQueue()
        self._unfinished: deque[Session] = deque()
        """Sessions with effects that take their time; each counts as a frame under way."""
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to work."""
        self._thread = threading.Thread(target=self._run, name="rankdumpd-committer")
        self._thread.start()

    def submit(self, frames: Sequence[Done], cost: int) -> None:
        """Hand over frames with what they occupy together; never waits."""
        self._done.put((frames, cost))

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

    def _batch(self, *, wait: bool) -> tuple[_Batch, bool]:
        batch = _Batch()
        if not wait and self._done.empty():
            return batch, True
        item = self._done.get()
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
            shares = self._shares(batch.frames)
            if self._commit(shares):
                for session, share in shares.items():
                    session.committed(share.outcomes, share.judged, share.declared)
                    self._apply(session)
        except Exception:
            # A fault in one batch must not silence the acknowledgements of all others.
            _log.exception("a batch of %d frames was not settled", len(batch.frames))
        finally:
            self._budget.give(batch.cost, items=len(batch.frames))

    def _apply(self, session: Session) -> None:
        done = True
        try:
            done = self._effects.apply_due(session)
        except Exception as error:
            request = session.request
            _log.exception("session %s of rank %d", request.session_id, request.rank)
            session.trouble(f"rank {request.rank}: a declaration had no effect: {error}")
        if done and session in self._unfinished:
            self._unfinished.remove(session)
            self._budget.give(0)
        elif not done and session not in self._unfinished:
            self._unfinished.append(session)
            self._budget.hold()

    def _shares(self, frames: Iterable[Done]) -> dict[Session, _Share]:
        shares: defaultdict[str, _Share] = defaultdict(_Share)
        for item in frames:
            share = shares[item.ticket.session_id]
            if isinstance(item, Outcome):
                share.outcomes.append(item)
            elif isinstance(item, Judged):
                share.judged.append(item)
            else:
                share.declared.append(item)
        return {self._registry.get(session_id): share for session_id, share in shares.items()}

    def _commit(self, shares: dict[Session, _Share]) -> bool:
        while True:
            try:
                self._ledger.commit(
                    [outcome for share in shares.values() for outcome in share.outcomes],
                    [judged for share in shares.values() for judged in share.judged],
                    [declared for share in shares.values() for declared in share.declared],
                    {s.request.session_id: s.watermark for s in shares},
                    synced=any(session.outlet.synced for session in shares),
                )
                return True
            except sqlite3.OperationalError as error:
                _log.error("the ledger cannot be written, trying again: %s", error)
                if self._stopping.wait(RETRY_S):
                    return False
