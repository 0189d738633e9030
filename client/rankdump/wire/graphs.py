"""Graphs, operators' arguments and stacks as messages and back; bounds are checked here."""

from __future__ import annotations

from rankdump.contract.errors import ProtocolError
from rankdump.contract.exchange import CallStacks, KernelArguments, OperatorArguments
from rankdump.contract.figure_rows import MAX_ROWS
from rankdump.contract.graph import (
    Graph,
    GraphNode,
    GraphParameter,
    GraphPart,
    SourceLine,
    TensorType,
)
from rankdump.wire.fields import common, utf8
from rankdump.wire.v1 import agent_pb2

MAX_DIMENSIONS = 64


def graph_part_to_wire(part: GraphPart) -> agent_pb2.GraphPart:
    """Return the message of some nodes of a graph."""
    graph = part.graph
    return agent_pb2.GraphPart(
        graph=graph.number,
        nodes=map(_node_to_wire, graph.nodes),
        parameters=[
            agent_pb2.GraphParameter(name=utf8(p.name), type=_type_to_wire(p.type))
            for p in graph.parameters
        ],
        compiled=graph.compiled,
        first=part.first,
        last=part.last,
    )


def graph_part_from_wire(message: agent_pb2.GraphPart) -> GraphPart:
    """Read some nodes of a graph."""
    graph = Graph(
        number=message.graph,
        nodes=tuple(map(_node_from_wire, message.nodes)),
        parameters=tuple(
            GraphParameter(p.name, _type_from_wire(p.type)) for p in message.parameters
        ),
        compiled=message.compiled,
    )
    return GraphPart(graph, first=message.first, last=message.last)


def arguments_to_wire(arguments: KernelArguments) -> agent_pb2.KernelArguments:
    """Return the message of what operators were configured with."""
    operators = [
        agent_pb2.OperatorArguments(
            graph=each.graph,
            op_type=utf8(each.op_type),
            op_name=utf8(each.op_name),
            values={utf8(name): utf8(text) for name, text in each.values.items()},
        )
        for each in arguments.operators
    ]
    return agent_pb2.KernelArguments(iteration=arguments.iteration, operators=operators)


def arguments_from_wire(message: agent_pb2.KernelArguments) -> KernelArguments:
    """Read what operators were configured with."""
    operators = tuple(
        OperatorArguments(each.graph, each.op_type, each.op_name, dict(each.values))
        for each in message.operators
    )
    return KernelArguments(message.iteration, operators)


def stacks_to_wire(stacks: CallStacks) -> agent_pb2.CallStacks:
    """Return the message of where calls came from."""
    return agent_pb2.CallStacks(
        iteration=stacks.iteration,
        calls=map(utf8, stacks.calls),
        stacks=stacks.stacks,
        texts=[agent_pb2.CallStack(lines=map(utf8, lines)) for lines in stacks.texts],
    )


def stacks_from_wire(message: agent_pb2.CallStacks) -> CallStacks:
    """Read where calls came from; ProtocolError when the columns do not fit each other."""
    calls, places = tuple(message.calls), tuple(message.stacks)
    if len(calls) != len(places) or len(calls) > MAX_ROWS:
        raise ProtocolError(
            f"columns of {len(calls)} calls and {len(places)} stacks, at most {MAX_ROWS}"
        )
    texts = tuple(tuple(stack.lines) for stack in message.texts)
    if max(places, default=-1) >= len(texts):
        raise ProtocolError(f"a call with stack {max(places)} of {len(texts)}")
    return CallStacks(message.iteration, calls, places, texts)


def _node_to_wire(node: GraphNode) -> agent_pb2.GraphNode:
    source = [
        agent_pb2.SourceLine(
            file=utf8(line.file),
            line=line.line,
            function=utf8(line.function),
            code=utf8(line.code),
        )
        for line in node.source
    ]
    return agent_pb2.GraphNode(
        name=utf8(node.name),
        op_type=utf8(node.op_type),
        inputs=map(utf8, node.inputs),
        outputs=map(_type_to_wire, node.outputs),
        attributes={utf8(name): utf8(text) for name, text in node.attributes.items()},
        source=source,
    )


def _node_from_wire(message: agent_pb2.GraphNode) -> GraphNode:
    return GraphNode(
        name=message.name,
        op_type=message.op_type,
        inputs=tuple(message.inputs),
        outputs=tuple(map(_type_from_wire, message.outputs)),
        attributes=dict(message.attributes),
        source=tuple(SourceLine(**common(line, SourceLine)) for line in message.source),
    )


def _type_to_wire(kind: TensorType) -> agent_pb2.TensorType:
    return agent_pb2.TensorType(dtype=kind.dtype, shape=kind.shape)


def _type_from_wire(message: agent_pb2.TensorType) -> TensorType:
    if len(message.shape) > MAX_DIMENSIONS:
        raise ProtocolError(f"tensor of a graph with {len(message.shape)} dimensions")
    return TensorType(message.dtype, tuple(message.shape))
