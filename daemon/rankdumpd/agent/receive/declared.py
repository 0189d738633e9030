"""Frames that are no record, from the wire and from the ledger; every number checked. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from google.protobuf.message import DecodeError

from rankdump.contract.errors import DamagedError, ProtocolError
from rankdump.contract.exchange import (
    CallStacks,
    Declaration,
    IterationEnd,
    KernelArguments,
    SessionEnd,
)
from rankdump.contract.figure_rows import FigureRows
from rankdump.contract.graph import Graph, GraphNode, GraphPart
from rankdump.wire import convert
from rankdump.wire.limits import LIMIT
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.values import Declared, Ticket

MAX_ITEMS = 1 << 16
"""Nodes of one part, inputs of one node, arguments of one operator, and the like."""
MAX_CHARACTERS = 1 << 16
"""Of a name, of an argument's value, of a line of source."""


def declaration_from(frame: agent_pb2.Frame, session_id: str) -> Declared:
    """Read a frame that is no record; ProtocolError when its numbers are out of bounds."""
    declaration = convert.declaration_from_wire(frame)
    _check_numbers(frame.sequence, declaration)
    if isinstance(declaration, GraphPart):
        _check_graph(frame.sequence, declaration.graph)
    elif isinstance(declaration, KernelArguments):
        _check_arguments(frame.sequence, declaration)
    elif isinstance(declaration, CallStacks):
        _check_stacks(frame.sequence, declaration)
    return Declared(Ticket(session_id, frame.sequence), declaration, frame.SerializeToString())


def declaration_again(raw: bytes, session_id: str) -> Declared:
    """Read a frame back as the ledger kept it; DamagedError when it is none."""
    return declaration_from(_frame_again(raw), session_id)


def figure_rows_again(raw: bytes) -> FigureRows:
    """Read rows of figures back as the ledger kept them; DamagedError when they are none."""
    return convert.figure_rows_from_wire(_frame_again(raw).figure_rows)


def _frame_again(raw: bytes) -> agent_pb2.Frame:
    try:
        return agent_pb2.Frame.FromString(raw)
    except DecodeError as error:
        raise DamagedError(f"frame in the ledger: {error}") from None


def _check_numbers(sequence: int, declaration: Declaration) -> None:
    highest = max(_numbers(declaration), default=0)
    if highest >= LIMIT:
        raise ProtocolError(f"frame {sequence} with number {highest}, over {LIMIT - 1}")


def _numbers(declaration: Declaration) -> Iterator[int]:
    # The columns of events and of figures have bounds of their own.
    if isinstance(declaration, IterationEnd):
        yield from (declaration.iteration, declaration.expected, declaration.stall_us)
        yield from (declaration.first_position, declaration.last_position)
        yield from declaration.dropped.values()
    elif isinstance(declaration, SessionEnd):
        yield declaration.iterations_seen
    elif isinstance(declaration, (KernelArguments, CallStacks)):
        yield declaration.iteration
    elif isinstance(declaration, GraphPart):
        graph = declaration.graph
        for node in graph.nodes:
            for kind in node.outputs:
                yield from kind.shape
        for parameter in graph.parameters:
            yield from parameter.type.shape


def _check_graph(sequence: int, graph: Graph) -> None:
    _check_counts(sequence, (len(graph.nodes), len(graph.parameters)))
    for node in graph.nodes:
        sides = (len(node.inputs), len(node.outputs), len(node.attributes), len(node.source))
        _check_counts(sequence, sides)
        _check_texts(sequence, _texts(node))
    for parameter in graph.parameters:
        _check_texts(sequence, (parameter.name, parameter.type.dtype))


def _texts(node: GraphNode) -> Iterator[str]:
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
    if max(counts) > MAX_ITEMS:
        raise ProtocolError(f"frame {sequence} with {max(counts)} items, at most {MAX_ITEMS}")


def _check_texts(sequence: int, texts: Iterable[str]) -> None:
    longest = max(map(len, texts), default=0)
    if longest > MAX_CHARACTERS:
        raise ProtocolError(
            f"frame {sequence} with a text of {longest} characters, at most {MAX_CHARACTERS}"
        )
