"""Where frames of one session come in: put together, admitted, handed on as there is room."""

from __future__ import annotations

from collections.abc import Callable

from rankdump.contract.exchange import RecordHead
from rankdump.contract.figure_rows import FigureRows
from rankdump.contract.selection import Verdict
from rankdump.contract.status import Load
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.admit import Admission
from rankdumpd.agent.budget import Budget
from rankdumpd.agent.committer import Committer, cost_bytes
from rankdumpd.agent.pipeline import Workers
from rankdumpd.agent.receive import Assembler, Received
from rankdumpd.agent.sessions import Session
from rankdumpd.agent.values import Declared, Judged, Parcel, Policy


class Intake:
    """Takes frames in their order, for one thread at a time; waits where there is no room."""

    def __init__(
        self,
        session: Session,
        *,
        budget: Budget,
        workers: Workers,
        committer: Committer,
        policy: Policy,
        load: Callable[[], Load],
    ) -> None:
        self._session = session
        self._budget, self._workers, self._committer = budget, workers, committer
        self._admission = Admission(session.plan, session.request.device, policy)
        self._load = load
        self._taken_bytes: int | None = None
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
        self._hand_on(self._assembler.feed(frame, data, lost=lost))

    def cut_off(self, reason: str) -> None:
        """Count the record whose rest will never come."""
        self._hand_on(self._assembler.cut_off(reason))

    def finish(self) -> None:
        """Accept that nothing more comes; ProtocolError within a record."""
        self._assembler.finish()

    def give_back(self) -> None:
        """Free the room of a record that did not come to its end."""
        if self._taken_bytes is not None:
            self._budget.give(self._taken_bytes)
            self._taken_bytes = None

    def _admit(self, head: RecordHead) -> Verdict:
        answer = self._admission.of_record(head, self._load())
        if answer.accepted:
            self._occupy(cost_bytes(head.byte_count))
        return answer

    def _hand_on(self, item: Received | None) -> None:
        if item is None:
            return
        if self._taken_bytes is None:
            self._occupy(cost_bytes(len(item.raw) if isinstance(item, Declared) else 0))
        if not self._session.claim(item.ticket.sequence):
            self.give_back()
            return
        cost, self._taken_bytes = self._taken_bytes or 0, None
        if isinstance(item, Parcel):
            self._workers.submit(item)
        elif isinstance(item, Declared):
            self._committer.submit(self._judged(item), cost)
        else:
            self._committer.submit(item, cost)

    def _judged(self, item: Declared) -> Declared | Judged:
        rows = item.declaration
        if not isinstance(rows, FigureRows):
            return item
        refused = self._admission.of_rows(rows, self._load())
        return Judged(item.ticket, rows, refused, item.raw)

    def _occupy(self, cost: int) -> None:
        self._budget.take(cost)
        self._taken_bytes = cost
