"""What stands in the place of a frame that cannot be read, so that a session can go on. Pure."""

from __future__ import annotations

from rankdump.contract.exchange import KernelArguments, RecordHead
from rankdump.contract.figure_rows import MAX_ROWS, FigureRows, TensorKind
from rankdump.contract.key import Side, TensorKey
from rankdump.contract.plan import UNNAMED
from rankdump.wire.limits import LIMIT
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.values import Declared, Judged, Outcome, Ticket, dropped

UNREADABLE = "unreadable"
_KIND = TensorKind(0, "", "", Side.OUTPUT, 0, "", (), 0)


def unreadable(
    ticket: Ticket, frame: agent_pb2.Frame, *, rank: int, net_name: str
) -> Outcome | Judged | Declared:
    """Return the end of a frame that cannot be read; its tensors are dropped.

    They count in the iteration that it names, as far as it names one.
    """
    body = frame.WhichOneof("body")
    if body == "record":
        iteration = frame.record.iteration % LIMIT
        head = _head(rank=rank, net_name=net_name, iteration=iteration)
        return dropped(ticket, head, UNREADABLE)
    if body == "figure_rows":
        count = min(len(frame.figure_rows.kinds), MAX_ROWS)
        rows = FigureRows(
            iteration=frame.figure_rows.iteration % LIMIT,
            kinds=(_KIND,) * count,
            timestamps_us=(0,) * count,
            figures=("",) * count,
        )
        return Judged(ticket, rows, {UNREADABLE: range(count)}, b"")
    blank = agent_pb2.Frame(sequence=ticket.sequence, kernel_arguments=agent_pb2.KernelArguments())
    return Declared(ticket, KernelArguments(0, ()), blank.SerializeToString())


def _head(*, rank: int, net_name: str, iteration: int) -> RecordHead:
    key = TensorKey(
        rank=rank,
        net_name=net_name or UNNAMED,
        graph=0,
        iteration=iteration,
        timestamp_us=0,
        op_type="",
        op_name="",
        side=Side.OUTPUT,
        slot=0,
    )
    return RecordHead(key=key, dtype="", shape=(), byte_count=0)
