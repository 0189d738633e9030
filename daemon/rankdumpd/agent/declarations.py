"""Metadata frames, parsed from the wire and again from the ledger, with every number and text
length checked, and the results that replace lost or unreadable frames. Pure.

The tensors of a lost or unreadable frame are counted as dropped; they have no names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain

from google.protobuf.message import DecodeError

from rankdump._core import drop_reasons
from rankdump._core.graph import GraphNode, GraphPart, OperatorGraph
from rankdump._core.record import MAX_FRAME_ROWS, StatisticRows, TensorKind, TensorSide
from rankdump._core.session_protocol import (
    CallStacks,
    ChangedPlan,
    IterationEnd,
    KernelArguments,
    MetadataItem,
    SessionEnd,
)
from rankdump._wire import session_messages
from rankdump._wire.message_fields import NUMBER_LIMIT
from rankdump.errors import CorruptedError, ProtocolError
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.records import FrameId, MetadataFrame, StatisticRowsResult

MAX_DECLARED_ITEMS = 1 << 16
"""Largest number of items in one message, such as nodes of a graph part, inputs of a node or
arguments of an operator.
"""
MAX_TEXT_CHARACTERS = 1 << 16
"""Largest number of characters of a name, of an argument's value or of a source line."""
_MAX_REMEMBERED_FRAMES = 4


def read_metadata_frame(frame: agent_pb2.Frame, session_id: str) -> MetadataFrame:
    """Return a metadata frame from the wire; ProtocolError when its numbers are out of bounds."""
    declaration = session_messages.metadata_from_wire(frame)
    _check_numbers(frame.sequence, declaration)
    if isinstance(declaration, GraphPart):
        _check_graph(frame.sequence, declaration.graph)
    elif isinstance(declaration, KernelArguments):
        _check_arguments(frame.sequence, declaration)
    elif isinstance(declaration, CallStacks):
        _check_stacks(frame.sequence, declaration)
    return MetadataFrame(
        FrameId(session_id, frame.sequence), declaration, frame.SerializeToString()
    )


def reread_metadata_frame(raw: bytes, session_id: str) -> MetadataFrame:
    """Return a metadata frame from its bytes in the ledger; CorruptedError when it cannot be
    parsed.
    """
    return read_metadata_frame(_parse_ledger_frame(raw), session_id)


@lru_cache(maxsize=_MAX_REMEMBERED_FRAMES)
def reread_statistic_rows(raw: bytes) -> StatisticRows:
    """Return rows of statistics from their bytes in the ledger; CorruptedError when they cannot be
    parsed.

    The result of the last calls is cached, because the manifest of an iteration needs the same rows
    as its table.
    """
    return session_messages.statistic_rows_from_wire(_parse_ledger_frame(raw).figure_rows)


def _parse_ledger_frame(raw: bytes) -> agent_pb2.Frame:
    try:
        return agent_pb2.Frame.FromString(raw)
    except DecodeError as error:
        raise CorruptedError(f"a frame in the ledger cannot be read: {error}") from None


def _check_numbers(sequence: int, declaration: MetadataItem) -> None:
    highest = max(_iter_numbers(declaration), default=0)
    if highest >= NUMBER_LIMIT:
        raise ProtocolError(f"frame {sequence} has the number {highest}, over {NUMBER_LIMIT - 1}")


def _iter_numbers(declaration: MetadataItem) -> Iterator[int]:
    # The columns of events and of statistics are checked elsewhere.
    if isinstance(declaration, IterationEnd):
        yield from (declaration.iteration, declaration.expected, declaration.stall_us)
        yield from (declaration.first_position, declaration.last_position)
        yield from declaration.dropped.values()
    elif isinstance(declaration, SessionEnd):
        yield declaration.iterations_seen
    elif isinstance(declaration, (KernelArguments, CallStacks, ChangedPlan)):
        yield declaration.iteration
    elif isinstance(declaration, GraphPart):
        graph = declaration.graph
        for node in graph.nodes:
            for kind in node.outputs:
                yield from kind.shape
        for parameter in graph.parameters:
            yield from parameter.type.shape


def _check_graph(sequence: int, graph: OperatorGraph) -> None:
    _check_counts(sequence, (len(graph.nodes), len(graph.parameters)))
    for node in graph.nodes:
        sides = (len(node.inputs), len(node.outputs), len(node.attributes), len(node.source))
        _check_counts(sequence, sides)
        _check_texts(sequence, _iter_texts(node))
    for parameter in graph.parameters:
        _check_texts(sequence, (parameter.name, parameter.type.dtype))


def _iter_texts(node: GraphNode) -> Iterator[str]:
    yield from (node.name, node.op_type, *node.inputs)
    yield from (kind.dtype for kind in node.outputs)
    yield from node.attributes
    yield from node.attributes.values()
    for line in node.source:
        yield from (line.file, line.function, line.code)


def _check_arguments(sequence: int, arguments: KernelArguments) -> None:
    _check_counts(sequence, (len(arguments.operators),))
    for each in arguments.operators:
        _check_counts(sequence, (len(each.values),))
        _check_texts(sequence, (each.op_type, each.op_name, *each.values, *each.values.values()))


def _check_stacks(sequence: int, stacks: CallStacks) -> None:
    _check_counts(sequence, (len(stacks.texts), *map(len, stacks.texts)))
    _check_texts(sequence, chain(stacks.calls, chain.from_iterable(stacks.texts)))


def _check_counts(sequence: int, counts: Iterable[int]) -> None:
    if max(counts) > MAX_DECLARED_ITEMS:
        raise ProtocolError(
            f"frame {sequence} has {max(counts)} items, at most {MAX_DECLARED_ITEMS} are accepted"
        )


def _check_texts(sequence: int, texts: Iterable[str]) -> None:
    longest = max(map(len, texts), default=0)
    if longest > MAX_TEXT_CHARACTERS:
        raise ProtocolError(
            f"frame {sequence} has a text of {longest} characters, "
            f"at most {MAX_TEXT_CHARACTERS} are accepted"
        )


UNREADABLE = "unreadable"
_UNNAMED_KIND = TensorKind(0, "", "", TensorSide.OUTPUT, 0, "", (), 0)


def read_lost_tensors(frame_id: FrameId, message: agent_pb2.Lost) -> StatisticRowsResult:
    """Return the result of a frame with tensors that a rank has lost; ProtocolError when their
    counts are out of bounds.
    """
    if message.iteration >= NUMBER_LIMIT:
        raise ProtocolError(f"frame {frame_id.sequence} has a number over {NUMBER_LIMIT - 1}")
    if not 1 <= message.tensors <= MAX_FRAME_ROWS:
        raise ProtocolError(
            f"frame {frame_id.sequence} reports {message.tensors} lost tensors, "
            f"expected 1 to {MAX_FRAME_ROWS}"
        )
    return _drop_rows(
        frame_id, message.iteration, message.tensors, drop_reasons.normalize_reason(message.reason)
    )


def make_unreadable_result(
    frame_id: FrameId, frame: agent_pb2.Frame
) -> StatisticRowsResult | MetadataFrame:
    """Return a result in place of an unreadable frame; the tensors of the frame are dropped.

    They are counted in the iteration that the frame names, or in iteration 0.
    """
    body = frame.WhichOneof("body")
    if body == "record":
        return _drop_rows(frame_id, frame.record.iteration % NUMBER_LIMIT, 1, UNREADABLE)
    if body == "figure_rows":
        count = min(len(frame.figure_rows.kinds), MAX_FRAME_ROWS)
        return _drop_rows(frame_id, frame.figure_rows.iteration % NUMBER_LIMIT, count, UNREADABLE)
    blank = agent_pb2.Frame(
        sequence=frame_id.sequence, kernel_arguments=agent_pb2.KernelArguments()
    )
    return MetadataFrame(frame_id, KernelArguments(0, ()), blank.SerializeToString())


def _drop_rows(frame_id: FrameId, iteration: int, count: int, reason: str) -> StatisticRowsResult:
    rows = StatisticRows(
        iteration=iteration,
        kinds=(_UNNAMED_KIND,) * count,
        timestamps_us=(0,) * count,
        statistics=("",) * count,
    )
    return StatisticRowsResult(frame_id, rows, {reason: range(count)}, b"")
