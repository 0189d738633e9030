"""Where frames of one session come in: put together, admitted, handed on as there is room."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from rankdump.contract.errors import ProtocolError, ResendError, RetryableError
from rankdump.contract.exchange import RecordHead
from rankdump.contract.figure_rows import FigureRows
from rankdump.contract.reasons import BY_ROOM
from rankdump.contract.selection import YES, Verdict
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.admit import Admission
from rankdumpd.agent.budget import Budget
from rankdumpd.agent.committer import Committer, Done, cost_bytes
from rankdumpd.agent.elements import Elements
from rankdumpd.agent.pipeline import Workers
from rankdumpd.agent.policy import Room
from rankdumpd.agent.receive import Assembler, Received
from rankdumpd.agent.sessions import Session
from rankdumpd.agent.tries import Tries
from rankdumpd.agent.values import Declared, Judged, Outcome, Parcel

SMALL_BYTES = 16 << 10
"""A record up to here costs more to hand on than to write."""
MOST_GATHERED = 256
MOST_GATHERED_BYTES = 1 << 20
"""What a stream may hold beside the budget: it is taken from there when it is handed on."""


MOST_TRIES = 3
"""After so many a frame that cannot be read is given up."""
MOST_GAPS = 10
"""After so many a rank that leaves a number out is refused: it does not have it."""

_log = logging.getLogger(__name__)


class Intake:
    """Takes frames in their order, for one thread at a time; waits where there is no room.

    Frames that are small wait for others that come with them: `hand_on` ends that.
    """

    def __init__(
        self,
        session: Session,
        *,
        budget: Budget,
        workers: Workers,
        committer: Committer,
        room: Callable[[], Room],
        tries: Tries,
    ) -> None:
        self._session = session
        self._budget, self._workers, self._committer = budget, workers, committer
        self._admission = Admission(session.plan, session.request.device)
        self._look_up_room = room
        self._room: Room | None = None
        self._tries = tries
        self._growing = False
        """Whether the budget has given room for a record that is not whole yet."""
        self._piece_bytes = 0
        """How much of a record the present frame brings."""
        self._gathered: list[Parcel | Done] = []
        self._gathered_cost = 0
        outlet = session.outlet
        self._assembler = Assembler(
            session.request.session_id,
            rank=session.request.rank,
            net_name=session.plan.output.net_name,
            highest_first=session.watermark + 1,
            figures=outlet.figures,
            elements=outlet.elements,
            degrades=outlet.degrades,
            known=session.known,
            admit=self._admit,
        )

    @property
    def last_sequence(self) -> int:
        """Number of the last frame that came; 0 before the first."""
        return self._assembler.last_sequence

    @property
    def within_record(self) -> bool:
        """Whether more of the last record has to come."""
        return self._assembler.within_record

    def take(self, frame: agent_pb2.Frame, data: Elements | None = None, *, lost: str = "") -> None:
        """Take a frame whose data may stand elsewhere; `lost` says why that data never came.

        ResendError when a frame is missing, or for the first few times that one cannot be read.
        """
        self._piece_bytes = _piece_bytes(frame) if data is None else len(data)
        if self._growing and frame.HasField("chunk"):
            self._budget.grow(self, self._piece_bytes)
        try:
            item = self._assembler.feed(frame, data, lost=lost)
        except ResendError as error:
            raise self._gap(error) from None
        except RetryableError:
            raise
        except Exception as error:
            item = self._unreadable(frame, error)
        self._gather(item)

    def cut_off(self, reason: str) -> None:
        """Count the record whose rest will never come."""
        self._gather(self._assembler.cut_off(reason))
        self.hand_on()

    def finish(self) -> None:
        """Accept that nothing more comes; ResendError within a record."""
        try:
            self._assembler.finish()
        except ResendError as error:
            raise self._gap(error) from None

    def hand_on(self) -> None:
        """Hand on what was gathered: nothing more comes with it."""
        gathered, cost = self._gathered, self._gathered_cost
        self._gathered, self._gathered_cost, self._room = [], 0, None
        if gathered:
            self._budget.take(cost, items=len(gathered))
            self._claim(gathered)

    def give_back(self) -> None:
        """Free the room of a record that did not come to its end."""
        if self._growing:
            self._budget.abandon(self)
            self._growing = False

    def _gap(self, error: ResendError) -> ResendError | ProtocolError:
        session_id, due = self._session.request.session_id, self._assembler.last_sequence + 1
        tries = self._tries.failed(session_id, f"gap before {due}")
        return error if tries < MOST_GAPS else ProtocolError(f"{error}, for the {tries}th time")

    def _unreadable(self, frame: agent_pb2.Frame, error: Exception) -> Received | None:
        """Give a frame up that failed too often; else let it be sent again."""
        request, number = self._session.request, frame.sequence
        if not number or number != self._assembler.last_sequence:
            raise error
        if not isinstance(error, ProtocolError):
            _log.error("session %s, frame %d", request.session_id, number, exc_info=error)
        tries = self._tries.failed(request.session_id, f"frame {number}")
        if tries < MOST_TRIES:
            raise ResendError(f"frame {number} cannot be read: {error}") from None
        self._session.trouble(f"rank {request.rank}: a frame could not be read: {error}")
        return self._assembler.settle_unreadable(frame)

    def _admit(self, head: RecordHead) -> Verdict:
        large = head.byte_count > SMALL_BYTES
        if large:
            self.hand_on()
        answer = self._admission.of_record(head, self._present_room())
        if answer.reason in BY_ROOM and self._is_there(head):
            answer = YES
        if answer.accepted and large:
            # What is only declared takes no room from others.
            self._budget.begin(self, cost_bytes(min(self._piece_bytes, head.byte_count)))
            self._growing = True
        return answer

    def _is_there(self, head: RecordHead) -> bool:
        """Return whether a killed process may have written it: then it takes no room, and a drop
        would leave a file that nobody knows.
        """
        return self._session.restored and self._session.outlet.writer.has(head)

    def _gather(self, item: Received | None) -> None:
        if item is None:
            return
        if isinstance(item, Parcel) and self._growing:
            self._budget.end(self, _cost(item))
            self._growing = False
            self._claim([item])
            return
        self.give_back()
        frame = item if isinstance(item, Parcel) else self._judged(item)
        self._gathered.append(frame)
        self._gathered_cost += _cost(frame)
        full = self._gathered_cost > MOST_GATHERED_BYTES
        if full or len(self._gathered) >= MOST_GATHERED:
            self.hand_on()

    def _judged(self, item: Outcome | Judged | Declared) -> Done:
        if not isinstance(item, Declared) or not isinstance(item.declaration, FigureRows):
            return item
        refused = self._admission.of_rows(item.declaration, self._present_room())
        return Judged(item.ticket, item.declaration, refused, item.raw)

    def _present_room(self) -> Room:
        # Asked once for all that comes together: that little more under way changes nothing.
        if self._room is None:
            self._room = self._look_up_room()
        return self._room

    def _claim(self, items: Sequence[Parcel | Done]) -> None:
        claimed = self._session.claim({item.ticket.sequence for item in items})
        if len(claimed) < len(items):
            left = [item for item in items if item.ticket.sequence not in claimed]
            self._budget.give(sum(map(_cost, left)), items=len(left))
            items = [item for item in items if item.ticket.sequence in claimed]
        parcels = [item for item in items if isinstance(item, Parcel)]
        done = [item for item in items if not isinstance(item, Parcel)]
        if parcels:
            self._workers.submit(parcels)
        if done:
            self._committer.submit(done, sum(map(_cost, done)))


def _cost(item: Parcel | Done) -> int:
    if isinstance(item, Parcel):
        return cost_bytes(item.head.byte_count)
    return cost_bytes(0 if isinstance(item, Outcome) else len(item.raw))


def _piece_bytes(frame: agent_pb2.Frame) -> int:
    return len(frame.chunk.data if frame.HasField("chunk") else frame.record.data)
