"""Enters batches of frames in the ledger; one that cannot be entered holds up no other."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from rankdump.contract.errors import UnavailableError
from rankdump.contract.exchange import RecordHead
from rankdump.contract.figure_rows import TensorKind
from rankdump.contract.key import Side
from rankdumpd.agent.ledger import Ledger
from rankdumpd.agent.registry import Registry
from rankdumpd.agent.sessions import Session
from rankdumpd.agent.values import Declared, Judged, Outcome, Ticket, dropped
from rankdumpd.meters import Meters

RETRY_S = 1.0
TRIES = 3
REASON = "internal_error"
_MOST_NUMBER = (1 << 63) - 1
"""Larger ones no column holds."""

Done: TypeAlias = "Outcome | Judged | Declared"

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Share:
    """One session's part of a batch."""

    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    judged: list[Judged] = field(default_factory=list[Judged])
    declared: list[Declared] = field(default_factory=list[Declared])

    @property
    def sequences(self) -> list[int]:
        """Numbers of its frames."""
        return [f.ticket.sequence for f in (*self.outcomes, *self.judged, *self.declared)]


Shares: TypeAlias = "dict[Session, Share]"


class Settler:
    """For one thread; waits while the ledger's disk refuses, until `stopping`."""

    def __init__(
        self, ledger: Ledger, registry: Registry, stopping: threading.Event, meters: Meters
    ) -> None:
        self._ledger, self._registry, self._stopping = ledger, registry, stopping
        self._meters = meters
        self.problem = ""
        """Why nothing can be entered at present; empty when it can."""

    def entered(self, frames: Sequence[Done]) -> Iterator[Shares]:
        """Enter frames and yield them, together or, where that fails, part by part.

        What cannot be entered by itself is counted as dropped; what cannot even be counted is left
        to the rank to send again. UnavailableError when the ledger is no more.
        """
        try:
            shares = self._shares(frames)
            done = self._commit(shares)
        except UnavailableError:
            raise
        except Exception as error:
            if len(frames) == 1:
                yield from self._by_itself(frames[0], error)
                return
            _log.warning("%d frames are entered in parts: %r", len(frames), error)
            half = len(frames) // 2
            yield from self.entered(frames[:half])
            yield from self.entered(frames[half:])
        else:
            if done:
                yield shares

    def _by_itself(self, frame: Done, error: Exception) -> Iterator[Shares]:
        ticket = frame.ticket
        session = self._registry.get(ticket.session_id)
        _log.error(
            "frame %d of session %s",
            ticket.sequence,
            ticket.session_id,
            exc_info=error,
            extra={"session": ticket.session_id},
        )
        for attempt in [frame] * (TRIES - 1) + [_counted(frame)]:
            try:
                shares = self._shares([attempt])
                done = self._commit(shares)
            except UnavailableError:
                raise
            except Exception as another:
                error = another
                continue
            if attempt is not frame:
                what = type(getattr(frame, "declaration", frame)).__name__
                who = f"rank {session.request.rank}, frame {ticket.sequence} ({what})"
                session.trouble(f"{who}: not entered, counted as {REASON}: {error}")
            if done:
                yield shares
            return
        session.unclaim([ticket.sequence], f"frame {ticket.sequence} was not settled: {error!r}")

    def _shares(self, frames: Sequence[Done]) -> Shares:
        shares: defaultdict[str, Share] = defaultdict(Share)
        for item in frames:
            share = shares[item.ticket.session_id]
            if isinstance(item, Outcome):
                share.outcomes.append(item)
            elif isinstance(item, Judged):
                share.judged.append(item)
            else:
                share.declared.append(item)
        return {self._registry.get(session_id): share for session_id, share in shares.items()}

    def _commit(self, shares: Shares) -> bool:
        while True:
            begun_s = time.monotonic()
            try:
                self._ledger.commit(
                    [outcome for share in shares.values() for outcome in share.outcomes],
                    [judged for share in shares.values() for judged in share.judged],
                    [declared for share in shares.values() for declared in share.declared],
                    {s.request.session_id: s.watermark for s in shares},
                    synced=any(session.outlet.synced for session in shares),
                )
            except sqlite3.OperationalError as error:
                self._meters.add("rankdump_agent_commit_errors_total")
                if str(error) != self.problem:
                    _log.error("the ledger cannot be written, trying again: %s", error)
                self.problem = str(error)
                if self._stopping.wait(RETRY_S):
                    return False
            else:
                self._meters.took("rankdump_agent_commit_seconds", time.monotonic() - begun_s)
                if self.problem:
                    _log.warning("the ledger can be written again")
                self.problem = ""
                return True


def _counted(frame: Done) -> Outcome | Judged:
    """Return what stands for a frame that cannot be entered as it is: nothing of it is kept."""
    if isinstance(frame, Judged):
        rows = replace(frame.rows, iteration=min(frame.rows.iteration, _MOST_NUMBER))
        return Judged(frame.ticket, rows, {REASON: range(len(rows))}, b"")
    if isinstance(frame, Outcome):
        return _bare(frame.ticket, frame.head.rank, frame.head.iteration)
    return _bare(frame.ticket, 0, getattr(frame.declaration, "iteration", 0))


def _bare(ticket: Ticket, rank: int, iteration: int) -> Outcome:
    nothing = TensorKind(0, "", "", Side.OUTPUT, 0, dtype="", shape=(), byte_count=0)
    head = RecordHead(nothing, min(iteration, _MOST_NUMBER), timestamp_us=0, rank=rank)
    return dropped(ticket, head, REASON)
