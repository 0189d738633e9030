"""Graph files that MindSpore's tools read: parts of a graph are joined, and written as `.ir` text
and as a `.pb` model. Pure.

Sources: MindSpore 2.3 Dump guide; MindInsight and the offline debugger as readers; files of
MindSpore 2.0 and 2.7. In a model, nodes are called `1`, `2`, ... and have their scope name in
`full_name`; an input names a node or a parameter.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from rankdump._core.graph import GraphNode, GraphPart, OperatorGraph, SourceLine, TensorType
from rankdump._core.record import sanitize_line
from rankdump._layout.profile import Profile
from rankdump.wire.v1 import model_pb2
from rankdumpd.agent.records import FrameId

EdgeSource: TypeAlias = "int | str"
"""Index of a node, or name of a parameter."""


@dataclass(frozen=True, slots=True)
class LinkedGraph:
    """A graph in which the source of every input is known."""

    number: int
    nodes: tuple[GraphNode, ...]
    inputs: tuple[tuple[EdgeSource, ...], ...]
    """Sources of the inputs of each node."""
    parameters: dict[str, TensorType | None]
    """Types of the parameters by name; None for a value from outside whose type is not known."""

    @property
    def ends(self) -> list[int]:
        """Indexes of the nodes whose outputs no other node reads."""
        read = {source for sources in self.inputs for source in sources}
        return [index for index in range(len(self.nodes)) if index not in read]

    def types_of(self, source: EdgeSource) -> tuple[TensorType, ...]:
        """Return the types of a source's outputs; empty when they are not known."""
        if isinstance(source, int):
            return self.nodes[source].outputs
        kind = self.parameters[source]
        return () if kind is None else (kind,)


def link_graph(graph: OperatorGraph) -> LinkedGraph:
    """Return the graph with the source of every input.

    Inputs of the network become parameters, as in MindSpore's files, so that slots keep their
    numbers.
    """
    index = {node.name: at for at, node in enumerate(graph.nodes)}
    parameters: dict[str, TensorType | None] = {}
    for parameter in graph.parameters:
        parameters.setdefault(parameter.name, parameter.type)
    inputs: list[tuple[EdgeSource, ...]] = []
    for at, node in enumerate(graph.nodes):
        sources: list[EdgeSource] = []
        for slot, name in enumerate(node.inputs):
            source = index.get(name, name) if name else f"outside.{at + 1}.{slot}"
            if isinstance(source, str):
                parameters.setdefault(source, None)
            sources.append(source)
        inputs.append(tuple(sources))
    return LinkedGraph(graph.number, graph.nodes, tuple(inputs), parameters)


def format_stack(source: Iterable[SourceLine]) -> list[str]:
    """Return `# In file FILE:LINE/CODE/` for each frame, in the order given."""
    return [
        f"# In file {sanitize_line(frame.file)}:{frame.line}/{sanitize_line(frame.code)}/"
        for frame in source
    ]


@dataclass(frozen=True, slots=True)
class GraphElementType:
    """One element type with the names that graph files use for it."""

    label: str
    number: model_pb2.DataType.ValueType


_ELEMENT_TYPES = {
    "bool": GraphElementType("Bool", model_pb2.DT_BOOL),
    "int8": GraphElementType("Int8", model_pb2.DT_INT8),
    "int16": GraphElementType("Int16", model_pb2.DT_INT16),
    "int32": GraphElementType("Int32", model_pb2.DT_INT32),
    "int64": GraphElementType("Int64", model_pb2.DT_INT64),
    "uint8": GraphElementType("UInt8", model_pb2.DT_UINT8),
    "uint16": GraphElementType("UInt16", model_pb2.DT_UINT16),
    "uint32": GraphElementType("UInt32", model_pb2.DT_UINT32),
    "uint64": GraphElementType("UInt64", model_pb2.DT_UINT64),
    "float16": GraphElementType("Float16", model_pb2.DT_FLOAT16),
    "float32": GraphElementType("Float32", model_pb2.DT_FLOAT32),
    "float64": GraphElementType("Float64", model_pb2.DT_FLOAT64),
    "bfloat16": GraphElementType("BFloat16", model_pb2.DT_BFLOAT16),
    "complex64": GraphElementType("Complex64", model_pb2.DT_UNDEFINED),
    "complex128": GraphElementType("Complex128", model_pb2.DT_UNDEFINED),
}


def find_element_type(dtype: str) -> GraphElementType:
    """Return MindSpore's name and number of an element type; a type without a number keeps its own
    name.
    """
    return _ELEMENT_TYPES.get(dtype) or GraphElementType(
        sanitize_line(dtype), model_pb2.DT_UNDEFINED
    )


def format_graph_shape(kind: TensorType) -> str:
    """Return the extents of a shape as `(8, 1)`."""
    return f"({', '.join(map(str, kind.shape))})"


def render_ir(graph: LinkedGraph, name: str) -> str:
    """Return the text of an `.ir` file."""
    places = {parameter: at + 1 for at, parameter in enumerate(graph.parameters)}
    lines = [
        f"# IR entry: @{name}",
        "# Total subgraphs: 1",
        "",
        f"# Total params: {len(places)}",
        "# Params:",
        *(
            f"{_format_reference(parameter, places)}: "
            f"{_format_types(() if kind is None else (kind,))}"
            for parameter, kind in graph.parameters.items()
        ),
        "",
        f"subgraph @{name}() {{",
        *(line for at in range(len(graph.nodes)) for line in _render_node(graph, at, places)),
        f"  Return({', '.join(f'%{at}' for at in graph.ends)})",
        "}",
    ]
    return "".join(f"{line}\n" for line in lines)


def _render_node(graph: LinkedGraph, at: int, places: Mapping[str, int]) -> Iterator[str]:
    node, sources = graph.nodes[at], graph.inputs[at]
    inputs = ", ".join(_format_reference(source, places) for source in sources)
    types = ", ".join(_format_types(graph.types_of(source)) for source in sources)
    yield f"  %{at}(CNode_{at}) = {sanitize_line(node.op_type)}({inputs}){_format_attributes(node)}"
    yield f"      : ({types}) -> ({_format_types(node.outputs)})"
    yield f"      # Fullname with scope: ({sanitize_line(node.name)})"
    for line in format_stack(node.source):
        yield f"      {line}"


def _format_reference(source: EdgeSource, places: Mapping[str, int]) -> str:
    return (
        f"%{source}"
        if isinstance(source, int)
        else f"%para{places[source]}_{sanitize_line(source)}"
    )


def _format_attributes(node: GraphNode) -> str:
    if not node.attributes:
        return ""
    pairs = (
        f"{sanitize_line(key)}: {json.dumps(text, ensure_ascii=False)}"
        for key, text in sorted(node.attributes.items())
    )
    return f" {{{sanitize_line(', '.join(pairs))}}}"


def _format_types(outputs: Sequence[TensorType]) -> str:
    if not outputs:
        return "<Tensor, NoShape>"
    if len(outputs) == 1:
        return (
            f"<Tensor[{find_element_type(outputs[0].dtype).label}], "
            f"{format_graph_shape(outputs[0])}>"
        )
    labels = ", ".join(f"Tensor[{find_element_type(kind.dtype).label}]" for kind in outputs)
    shapes = ", ".join(map(format_graph_shape, outputs))
    return f"<Tuple[{labels}], TupleShape({shapes})>"


_IR_VERSION = 1


def render_model(graph: LinkedGraph, name: str) -> bytes:
    """Return the bytes of a `.pb` model."""
    body = model_pb2.GraphProto(
        name=name,
        root_name=str(graph.number),
        node=[
            _make_node(at + 1, node, sources)
            for at, (node, sources) in enumerate(zip(graph.nodes, graph.inputs, strict=True))
        ],
        parameters=[
            model_pb2.ParameterProto(name=sanitize_line(parameter), type=_make_tensor_type(kind))
            for parameter, kind in graph.parameters.items()
        ],
        outputs=[
            model_pb2.OutputProto(name=str(at + 1), type=_make_type(graph.nodes[at].outputs))
            for at in graph.ends
        ],
    )
    model = model_pb2.ModelProto(ir_version=_IR_VERSION, graph=body)
    return model.SerializeToString(deterministic=True)


def _make_node(number: int, node: GraphNode, sources: Sequence[EdgeSource]) -> model_pb2.NodeProto:
    full_name = sanitize_line(node.name)
    edge = model_pb2.InputProto.DATA_EDGE
    return model_pb2.NodeProto(
        name=str(number),
        op_type=sanitize_line(node.op_type),
        scope=full_name.rpartition("/")[0],
        full_name=full_name,
        input=[
            model_pb2.InputProto(
                name=str(source + 1) if isinstance(source, int) else sanitize_line(source),
                type=edge,
            )
            for source in sources
        ],
        attribute=[_make_attribute(key, text) for key, text in sorted(node.attributes.items())],
        output_type=_make_type(node.outputs),
        # The innermost line is first, as in MindSpore's own files.
        source_address="".join(f"      {line}\n" for line in reversed(format_stack(node.source))),
    )


def _make_attribute(key: str, text: str) -> model_pb2.AttributeProto:
    value = model_pb2.ValueProto(dtype=model_pb2.DT_STRING, str_val=text)
    return model_pb2.AttributeProto(name=key, value=value)


def _make_type(outputs: Sequence[TensorType]) -> model_pb2.TypeProto:
    if not outputs:
        return model_pb2.TypeProto(data_type=model_pb2.DT_UNDEFINED)
    if len(outputs) == 1:
        return _make_tensor_type(outputs[0])
    sequence = model_pb2.TypeProto.Sequence(elem_types=map(_make_tensor_type, outputs))
    return model_pb2.TypeProto(data_type=model_pb2.DT_TUPLE, sequence_type=sequence)


def _make_tensor_type(kind: TensorType | None) -> model_pb2.TypeProto:
    tensor = model_pb2.TypeProto.Tensor(elem_type=model_pb2.DT_UNDEFINED)
    if kind is not None:
        extents = [model_pb2.TensorShapeProto.Dimension(size=size) for size in kind.shape]
        shape = model_pb2.TensorShapeProto(dim=extents)
        tensor = model_pb2.TypeProto.Tensor(
            elem_type=find_element_type(kind.dtype).number, shape=shape
        )
    return model_pb2.TypeProto(data_type=model_pb2.DT_TENSOR, tensor_type=tensor)


def render_graph(graph: OperatorGraph, profile: Profile) -> dict[str, bytes]:
    """Return the bytes of a graph's files by file name."""
    # For profiles with short names, MindInsight takes the graph's number from the text after the
    # last `_`.
    name = f"kernel_graph{'_' if profile.short_names else ''}{graph.number}"
    file = f"ms_output_trace_code_graph_{graph.number}"
    linked = link_graph(graph)
    return {
        f"{file}.ir": render_ir(linked, name).encode(),
        f"{file}.pb": render_model(linked, name),
    }


class GraphAssembler:
    """The graphs of one session that are not complete yet; not for use from several threads."""

    def __init__(self) -> None:
        self._waiting: dict[int, OperatorGraph] = {}
        self._frame_ids: dict[int, list[FrameId]] = {}

    def add_part(self, frame_id: FrameId, part: GraphPart) -> OperatorGraph | None:
        """Add a part of a graph; return the complete graph when the part was the last one.

        A first part begins the graph anew, because a graph that has grown is sent again.
        """
        number = part.graph.number
        begun = None if part.first else self._waiting.get(number)
        graph = join_graphs(begun, part.graph) if begun else part.graph
        self._frame_ids.setdefault(number, []).append(frame_id)
        self._waiting[number] = graph
        return self._waiting.pop(number) if part.last else None

    def forget_graph(self, number: int) -> list[FrameId]:
        """Remove the parts of a graph whose files are written; return their frame ids."""
        return self._frame_ids.pop(number, [])


def join_graphs(graph: OperatorGraph, more: OperatorGraph) -> OperatorGraph:
    """Return a graph with the nodes and parameters of both, in order."""
    return replace(
        graph,
        nodes=(*graph.nodes, *more.nodes),
        parameters=(*graph.parameters, *more.parameters),
        compiled=graph.compiled or more.compiled,
    )
