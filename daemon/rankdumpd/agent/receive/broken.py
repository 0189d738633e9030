"""What stands in the place of a frame that was lost or cannot be read, so that a session can go on.

Pure. Its tensors are counted as dropped; they have no names.
"""

from __future__ import annotations

from rankdump.contract import reasons
from rankdump.contract.errors import ProtocolError
from rankdump.contract.exchange import KernelArguments
from rankdump.contract.figure_rows import MAX_ROWS, FigureRows, TensorKind
from rankdump.contract.key import Side
from rankdump.wire.limits import LIMIT
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.values import Declared, Judged, Ticket

UNREADABLE = "unreadable"
_KIND = TensorKind(0, "", "", Side.OUTPUT, 0, "", (), 0)


def lost_by_rank(ticket: Ticket, message: agent_pb2.Lost) -> Judged:
    """Return the tensors that a rank says it has lost; ProtocolError for what no frame brings."""
    if message.iteration >= LIMIT:
        raise ProtocolError(f"frame {ticket.sequence} with a number over {LIMIT - 1}")
    if not 1 <= message.tensors <= MAX_ROWS:
        raise ProtocolError(
            f"frame {ticket.sequence} stands for {message.tensors} tensors, from 1 to {MAX_ROWS} do"
        )
    return _dropped(ticket, message.iteration, message.tensors, reasons.known(message.reason))


def unreadable(ticket: Ticket, frame: agent_pb2.Frame) -> Judged | Declared:
    """Return the end of a frame that cannot be read; its tensors are dropped.

    They count in the iteration that it names, as far as it names one.
    """
    body = frame.WhichOneof("body")
    if body == "record":
        return _dropped(ticket, frame.record.iteration % LIMIT, 1, UNREADABLE)
    if body == "figure_rows":
        count = min(len(frame.figure_rows.kinds), MAX_ROWS)
        return _dropped(ticket, frame.figure_rows.iteration % LIMIT, count, UNREADABLE)
    blank = agent_pb2.Frame(sequence=ticket.sequence, kernel_arguments=agent_pb2.KernelArguments())
    return Declared(ticket, KernelArguments(0, ()), blank.SerializeToString())


def _dropped(ticket: Ticket, iteration: int, count: int, reason: str) -> Judged:
    rows = FigureRows(
        iteration=iteration,
        kinds=(_KIND,) * count,
        timestamps_us=(0,) * count,
        figures=("",) * count,
    )
    return Judged(ticket, rows, {reason: range(count)}, b"")
