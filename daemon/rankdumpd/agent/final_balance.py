"""What a rank leaves that waits for its session no longer: tensors as lost ones, ends, a goodbye.

Pure; every number is checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rankdump.contract.errors import ProtocolError
from rankdump.contract.exchange import IterationEnd, SessionEnd, SessionRequest
from rankdump.contract.status import IterationStatus, SessionState, SessionStatus
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent import vet
from rankdumpd.agent.balance import Tallies
from rankdumpd.agent.receive import declaration_from, lost_by_rank
from rankdumpd.agent.sessions.status import status_of
from rankdumpd.agent.values import Ticket

NOTE = "its session was not open when it ended: nothing of it is in the tree"


@dataclass(frozen=True, slots=True)
class FinalBalance:
    """Frames that wait for a session, and what they say."""

    frames: tuple[agent_pb2.Frame, ...]
    session: SessionStatus
    iterations: tuple[IterationStatus, ...]

    @property
    def lost(self) -> int:
        """Tensors that are lost."""
        return sum(sum(status.dropped.values()) for status in self.iterations)


def final_balance_of(request: SessionRequest, frames: Iterable[agent_pb2.Frame]) -> FinalBalance:
    """Read what a rank left; ProtocolError when it is anything else than that."""
    plan, frames = vet.plan_of(request), tuple(frames)
    tallies, farewell = Tallies(), SessionEnd(0)
    for number, frame in enumerate(frames, 1):
        if frame.sequence != number:
            raise ProtocolError(f"frame {frame.sequence} where {number} is due")
        if frame.HasField("lost"):
            lost = lost_by_rank(Ticket(request.session_id, number), frame.lost)
            tallies.add((), (lost,))
            continue
        declaration = declaration_from(frame, request.session_id).declaration
        if isinstance(declaration, IterationEnd):
            tallies.end(request, declaration, number)
        elif isinstance(declaration, SessionEnd):
            farewell = SessionEnd(declaration.iterations_seen, (*declaration.notes, NOTE))
        else:
            raise ProtocolError(f"frame {number} is none that a rank without a session leaves")
    status = status_of(request, plan, SessionState.CLOSED, farewell)
    return FinalBalance(frames, status, tuple(tallies.statuses(request)))
