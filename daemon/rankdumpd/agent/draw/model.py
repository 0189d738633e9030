"""A graph as a `ModelProto`, filled as MindSpore fills it. Pure.

Nodes are called `1`, `2`, ... and know their scope name as `full_name`; an input names a node or
a parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

from rankdump.contract.graph import GraphNode, TensorType
from rankdump.contract.key import one_line
from rankdump.wire.v1 import model_pb2
from rankdumpd.agent.draw.edges import Linked, Source
from rankdumpd.agent.draw.source import stack_lines
from rankdumpd.agent.draw.types import kind_of

_IR_VERSION = 1


def model_bytes(graph: Linked, name: str) -> bytes:
    """Return the whole file."""
    body = model_pb2.GraphProto(
        name=name,
        root_name=str(graph.number),
        node=[
            _node(at + 1, node, sources)
            for at, (node, sources) in enumerate(zip(graph.nodes, graph.inputs, strict=True))
        ],
        parameters=[
            model_pb2.ParameterProto(name=one_line(parameter), type=_tensor(kind))
            for parameter, kind in graph.parameters.items()
        ],
        outputs=[
            model_pb2.OutputProto(name=str(at + 1), type=_type(graph.nodes[at].outputs))
            for at in graph.ends
        ],
    )
    model = model_pb2.ModelProto(ir_version=_IR_VERSION, graph=body)
    return model.SerializeToString(deterministic=True)


def _node(number: int, node: GraphNode, sources: Sequence[Source]) -> model_pb2.NodeProto:
    full_name = one_line(node.name)
    edge = model_pb2.InputProto.DATA_EDGE
    return model_pb2.NodeProto(
        name=str(number),
        op_type=one_line(node.op_type),
        scope=full_name.rpartition("/")[0],
        full_name=full_name,
        input=[model_pb2.InputProto(name=_input(source), type=edge) for source in sources],
        attribute=[_attribute(key, text) for key, text in sorted(node.attributes.items())],
        output_type=_type(node.outputs),
        # The innermost line first, as in MindSpore's own files.
        source_address="".join(f"      {line}\n" for line in reversed(stack_lines(node.source))),
    )


def _input(source: Source) -> str:
    return str(source + 1) if isinstance(source, int) else one_line(source)


def _attribute(key: str, text: str) -> model_pb2.AttributeProto:
    value = model_pb2.ValueProto(dtype=model_pb2.DT_STRING, str_val=text)
    return model_pb2.AttributeProto(name=key, value=value)


def _type(outputs: Sequence[TensorType]) -> model_pb2.TypeProto:
    if not outputs:
        return model_pb2.TypeProto(data_type=model_pb2.DT_UNDEFINED)
    if len(outputs) == 1:
        return _tensor(outputs[0])
    sequence = model_pb2.TypeProto.Sequence(elem_types=map(_tensor, outputs))
    return model_pb2.TypeProto(data_type=model_pb2.DT_TUPLE, sequence_type=sequence)


def _tensor(kind: TensorType | None) -> model_pb2.TypeProto:
    tensor = model_pb2.TypeProto.Tensor(elem_type=model_pb2.DT_UNDEFINED)
    if kind is not None:
        extents = [model_pb2.TensorShapeProto.Dimension(size=size) for size in kind.shape]
        shape = model_pb2.TensorShapeProto(dim=extents)
        tensor = model_pb2.TypeProto.Tensor(elem_type=kind_of(kind.dtype).number, shape=shape)
    return model_pb2.TypeProto(data_type=model_pb2.DT_TENSOR, tensor_type=tensor)
