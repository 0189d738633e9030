"""Where frames of one session come in: put together, admitted, handed on as there is room."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rankdump.contract.exchange import RecordHead
from rankdump.contract.figure_rows import FigureRows
from rankdump.contract.selection import Verdict
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.admit import Admission
from rankdumpd.agent.budget import Budget
from rankdumpd.agent.committer import Committer, Done, cost_bytes
from rankdumpd.agent.pipeline import Workers
from rankdumpd.agent.policy import Room
from rankdumpd.agent.receive import Assembler, Received
from rankdumpd.agent.sessions import Session
from rankdumpd.agent.values import Declared, Judged, Outcome, Parcel

SMALL_BYTES = 16 << 10
"""A record up to here costs more to hand on than to write."""
MOST_GATHERED = 256
MOST_GATHERED_BYTES = 1 << 20
"""What a stream may hold beside the budget: it is taken from there when it is handed on."""


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
    ) -> None:
        self._session = session
        self._budget, self._workers, self._committer = budget, workers, committer
        self._admission = Admission(session.plan, session.request.device)
        self._look_up_room = room
        self._room: Room | None = None
        self._taken_bytes: int | None = None
        """What the budget gave for a record that is not whole yet."""
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

    def take(
        self, frame: agent_pb2.Frame, data: memoryview | None = None, *, lost: str = ""
    ) -> None:
        """Take a frame whose data may stand elsewhere; `lost` says why that data never came."""
        self._gather(self._assembler.feed(frame, data, lost=lost))

    def cut_off(self, reason: str) -> None:
        """Count the record whose rest will never come."""
        self._gather(self._assembler.cut_off(reason))
        self.hand_on()

    def finish(self) -> None:
        """Accept that nothing more comes; ProtocolError within a record."""
        self._assembler.finish()

    def hand_on(self) -> None:
        """Hand on what was gathered: nothing more comes with it."""
        gathered, cost = self._gathered, self._gathered_cost
        self._gathered, self._gathered_cost, self._room = [], 0, None
        if gathered:
            self._budget.take(cost, items=len(gathered))
            self._claim(gathered)

    def give_back(self) -> None:
        """Free the room of a record that did not come to its end."""
        if self._taken_bytes is not None:
            self._budget.give(self._taken_bytes)
            self._taken_bytes = None

    def _admit(self, head: RecordHead) -> Verdict:
        large = head.byte_count > SMALL_BYTES
        if large:
            self.hand_on()
        answer = self._admission.of_record(head, self._present_room())
        if answer.accepted and large:
            self._budget.take(cost_bytes(head.byte_count))
            self._taken_bytes = cost_bytes(head.byte_count)
        return answer

    def _gather(self, item: Received | None) -> None:
        if item is None:
            return
        if isinstance(item, Parcel) and self._taken_bytes is not None:
            self._taken_bytes = None
            self._claim([item])
            return
        self.give_back()
        frame = item if isinstance(item, Parcel) else self._judged(item)
        self._gathered.append(frame)
        self._gathered_cost += _cost(frame)
        full = self._gathered_cost > MOST_GATHERED_BYTES
        if full or len(self._gathered) >= MOST_GATHERED:
            self.hand_on()

    def _judged(self, item: Outcome | Declared) -> Done:
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
