"""Sessions of ranks: who they are, what they have sent, and which of two claimants is live."""

from __future__ import annotations

import dataclasses
import secrets
import threading
from collections.abc import Collection, Iterable

from rankdump.contract import selection
from rankdump.contract.exchange import IterationEnd, SessionEnd, SessionRequest
from rankdump.contract.plan import DumpPlan
from rankdump.contract.status import IterationStatus, SessionState, SessionStatus
from rankdumpd.agent import balance
from rankdumpd.agent.balance import Tallies
from rankdumpd.agent.draw.parts import GraphParts
from rankdumpd.agent.program import ProgramOrder
from rankdumpd.agent.progress import Progress
from rankdumpd.agent.sessions.due import Due
from rankdumpd.agent.sessions.outlet import outlet_of
from rankdumpd.agent.sessions.ports import Listener, Ring
from rankdumpd.agent.sessions.status import status_of
from rankdumpd.agent.values import (
    CountRow,
    Declared,
    EndRow,
    Judged,
    Outcome,
    QuietRank,
    SessionRow,
)


class Session:
    """One rank's session; safe to use from several threads."""

    def __init__(self, request: SessionRequest, plan: DumpPlan) -> None:
        self.plan = plan
        self.outlet = outlet_of(request, plan)
        self.introduced = True
        """What describes its rank is in the tree, or cannot be."""
        self.restored = False
        """An earlier process may have written what it did not come to enter."""
        self.tabulated_to = 0
        """Rows of every frame up to this number stand in their tables."""
        self.due = Due()
        self.graphs = GraphParts()
        self.program = ProgramOrder()
        self.request = request
        self.token = secrets.token_bytes(16)
        self.excluded = selection.device_verdict(plan, request.device).reason
        self._lock = threading.Lock()
        self._expected = True
        self._farewell: SessionEnd | None = None
        self._progress = Progress()
        self._acknowledged = 0
        self._under_way: set[int] = set()
        self._tallies = Tallies()
        self._troubles: dict[str, None] = {}
        self._warnings: dict[str, None] = {}
        self._listener: Listener | None = None
        self._ring: Ring | None = None
        self._slab_waits = False
        self._gone = False
        """Its process has ended, and all it left was taken in."""

    def restore(
        self,
        row: SessionRow,
        *,
        beyond: Iterable[int],
        counts: Iterable[CountRow],
        ends: Iterable[EndRow],
        due: Iterable[Declared],
        tabulated_to: int,
    ) -> None:
        """Become what the ledger remembers; before anybody else knows this session."""
        self._expected, self.restored = False, True
        self.tabulated_to = tabulated_to
        if self.outlet.tables is not None:
            self.outlet.tables.look_back()
        if row.state is SessionState.CLOSED:
            self._farewell = SessionEnd(row.iterations_seen, row.notes)
        self.program = ProgramOrder(row.ordered_graphs)
        self._progress = Progress(row.watermark, beyond)
        self._acknowledged = self._progress.watermark
        self.due.restore(due)
        self._tallies.restore(counts, ends)

    @property
    def watermark(self) -> int:
        """Every frame up to this number is committed."""
        return self._progress.watermark

    @property
    def acknowledged(self) -> int:
        """Every frame up to this number is committed, and a goodbye has taken effect."""
        return self._acknowledged

    @property
    def live(self) -> bool:
        """Whether its stream is connected."""
        return self._listener is not None

    @property
    def idle(self) -> bool:
        """Whether no stream is connected and no frame under way."""
        return self._listener is None and not self._under_way

    @property
    def closed(self) -> bool:
        """Whether it said goodbye, and nothing came after that."""
        return self._farewell is not None

    @property
    def over(self) -> bool:
        """Whether nothing of it is left to be done, as far as this process knows."""
        done = self._ring is None and self.due.all_here
        return self.idle and done and self.status().state is not SessionState.OPEN

    @property
    def quiet_at(self) -> QuietRank | None:
        """How far its frames are committed while no other is known of; None while one is.

        A rank that may come back, or that said goodbye, is not quiet.
        """
        with self._lock:
            listener, busy = self._listener, bool(self._under_way) or self.closed
            rest = self._gone if listener is None else listener.at_rest
            if busy or not rest:
                return None
            request = self.request
            return QuietRank(request.job_id, request.rank, request.session_id, self.watermark)

    def known(self, sequence: int) -> bool:
        """Return whether a frame arrived whole before, committed or not.

        Asked without the lock, for every frame: `claim` has the last word.
        """
        return sequence in self._progress or sequence in self._under_way

    def claim(self, sequences: set[int]) -> set[int]:
        """Take responsibility for frames that arrived whole; return those that nobody has."""
        with self._lock:
            new = {number for number in sequences if not self.known(number)}
            if new:
                self._under_way.update(new)
                self._farewell = None
            return new

    def unclaim(self, sequences: Iterable[int], reason: str) -> None:
        """Give frames up that could not be settled: the rank is to send them again."""
        with self._lock:
            self._under_way.difference_update(sequences)
            listener, ring = self._listener, self._ring
        if ring:
            ring.abandon(reason)
        if listener:
            listener.end(reason)

    def committed(
        self,
        outcomes: Collection[Outcome],
        judged: Collection[Judged],
        declared: Collection[Declared],
    ) -> None:
        """Count frames that stand in the ledger now."""
        with self._lock:
            self._tallies.add(outcomes, judged)
            settled = [each.ticket.sequence for each in (*outcomes, *judged, *declared)]
            self.due.add(declared)
            self._progress.add(settled)
            self._under_way.difference_update(settled)

    def stored_anew(self, iteration: int, more_bytes: int) -> None:
        """Count that kept tensors take another room than they did."""
        with self._lock:
            self._tallies.stored_anew(iteration, more_bytes)

    def ends_first(self, declared: Declared, end: IterationEnd) -> bool:
        """Return whether an end of an iteration was not counted yet."""
        with self._lock:
            return self._tallies.ends_first(end, declared.ticket.sequence)

    def end_iteration(self, declared: Declared, end: IterationEnd) -> IterationStatus:
        """Complete an iteration, again or not; return its balance."""
        with self._lock:
            return self._tallies.end(self.request, end, declared.ticket.sequence)

    def say_goodbye(self, end: SessionEnd) -> None:
        """Close the session: the rank has nothing more to send."""
        with self._lock:
            self._farewell = end

    def trouble(self, sentence: str) -> bool:
        """Remember what people should know of this session; return whether that is new."""
        with self._lock:
            new = sentence not in self._troubles
            self._troubles.setdefault(sentence)
            return new

    def warn(self, text: str) -> None:
        """Let the rank say something in its log; the same text once."""
        with self._lock:
            listener = None if text in self._warnings else self._listener
            self._warnings[text] = None
        if listener:
            listener.warn(text)

    def acknowledge(self) -> None:
        """Tell the rank how far its frames are safe.

        A goodbye is acknowledged when all before it has taken effect, or waits for its disk;
        anything else need not wait for the end of an iteration, which the ledger has.
        """
        with self._lock:
            before = [at - 1 for at in self.due.goodbyes]
            safe = min([self._progress.watermark, *before])
            self._acknowledged = max(self._acknowledged, safe)
            listener, ring = self._listener, self._ring
        # Before the rank hears of it: it looks for room then.
        if ring:
            ring.acknowledge(self._acknowledged)
        if listener:
            listener.acknowledge(self._acknowledged)

    def attach(self, ring: Ring | None) -> None:
        """Let a slab hear of what is acknowledged; None for no slab."""
        with self._lock:
            self._ring, self._slab_waits = ring, False

    def offer_slab(self) -> None:
        """Let the rank know, now or when it comes, that its slab was made meanwhile."""
        with self._lock:
            self._slab_waits, listener = True, self._listener
        if listener:
            listener.offer_slab()

    def reopen(self, request: SessionRequest) -> None:
        """Let the same rank come back, with a new token."""
        with self._lock:
            self.request = dataclasses.replace(request, plan_json=self.request.plan_json)
            self.token = secrets.token_bytes(16)
            self._expected, self._gone = True, False

    def connect(self, listener: Listener) -> None:
        """Make a stream the only one of this session; an earlier one is ended."""
        with self._lock:
            earlier, self._listener = self._listener, listener
            warnings, slab_waits = list(self._warnings), self._slab_waits
        if earlier:
            earlier.end("the session is connected by another stream")
        # Nobody knows whether they got through before the last stream broke.
        for text in warnings:
            listener.warn(text)
        if slab_waits:
            listener.offer_slab()
        listener.acknowledge(self._acknowledged)

    def disconnect(self, listener: Listener) -> bool:
        """Note that a stream is gone; return whether it was the one that counts."""
        with self._lock:
            if self._listener is not listener:
                return False
            self._listener = None
            self._expected = False
            return True

    def lose(self) -> None:
        """Note that its process is gone."""
        self._expected, self._gone = False, True

    def status(self) -> SessionStatus:
        """Return who this is and how it stands."""
        with self._lock:
            farewell = self._farewell or SessionEnd(0)
            return status_of(self.request, self.plan, self._state(), farewell)

    def _state(self) -> SessionState:
        if self._farewell:
            return SessionState.CLOSED
        if self._listener or self._expected:
            return SessionState.OPEN
        return SessionState.LOST

    def iterations(self) -> list[IterationStatus]:
        """Return the balance of every iteration that sent anything, in order."""
        with self._lock:
            return self._tallies.statuses(self.request)

    def findings(self) -> list[str]:
        """Return what people should know of this session."""
        return [
            *self._troubles,
            *self.due.complaints(),
            *balance.findings(self.status(), self.iterations()),
        ]
