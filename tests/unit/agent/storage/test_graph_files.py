"""Tests of graph files in the formats that MindSpore's tools read."""

from __future__ import annotations

import pytest

from rankdump._analysis.reader.source_lines import parse_ir_operators
from rankdump._core.graph import (
    GraphNode,
    GraphParameter,
    GraphPart,
    OperatorGraph,
    SourceLine,
    TensorType,
)
from rankdump._layout.profile import PROFILES
from rankdump.wire.v1 import model_pb2
from rankdumpd.agent.records import FrameId
from rankdumpd.agent.storage.graph_files import GraphAssembler, render_graph

CONV = "Default/network-Net/conv1-Conv2d/Conv2d-op0"
SPLIT = "Default/network-Net/Split-op0"
STACK = (
    SourceLine("/data/train.py", 16, "main", "loss = net(x)"),
    SourceLine("/data/net.py", 7, "forward", "return self.conv1(x)"),
)
GRAPH = OperatorGraph(
    3,
    (
        GraphNode(
            CONV,
            "Conv2d",
            ("", "conv1.weight"),
            (TensorType("float32", (8, 2, 6, 6)),),
            {"stride": "(1, 1)", "bias": "False"},
            STACK,
        ),
        GraphNode(
            SPLIT,
            "Split",
            (CONV, "gone-op7"),
            (TensorType("bfloat16", (4, 2)), TensorType("int64", ())),
        ),
        GraphNode("Default/network-Net/Print-op0", "Print", (SPLIT,)),
    ),
    (GraphParameter("conv1.weight", TensorType("float32", (2, 1, 3, 3))),),
)


def model(graph: OperatorGraph, profile: str = "ms2.3") -> model_pb2.GraphProto:
    files = render_graph(graph, PROFILES[profile])
    data = files[f"ms_output_trace_code_graph_{graph.number}.pb"]
    return model_pb2.ModelProto.FromString(data).graph


def ir(graph: OperatorGraph) -> list[str]:
    files = render_graph(graph, PROFILES["ms2.3"])
    return files[f"ms_output_trace_code_graph_{graph.number}.ir"].decode().splitlines()


@pytest.mark.parametrize(
    ("profile", "name"),
    [("ms2.0", "kernel_graph_3"), ("ms2.3", "kernel_graph3"), ("ms2.4", "kernel_graph3")],
)
def test_graph_name_follows_profile(profile, name):
    graph = model(GRAPH, profile)
    assert (graph.name, graph.root_name) == (name, "3")


def test_model_nodes_have_unique_names_and_full_names():
    """A node is found by its number and by the name that files and order lists carry."""
    nodes = model(GRAPH).node
    assert [node.name for node in nodes] == ["1", "2", "3"]
    assert [node.full_name for node in nodes] == [node.name for node in GRAPH.nodes]
    assert nodes[0].op_type == "Conv2d"
    assert nodes[0].scope == "Default/network-Net/conv1-Conv2d"


def test_model_inputs_are_nodes_or_parameters():
    """Slots keep their numbers: a value from outside is a parameter without a type."""
    graph = model(GRAPH)
    inputs = [[edge.name for edge in node.input] for node in graph.node]
    assert inputs == [["outside.1.0", "conv1.weight"], ["1", "gone-op7"], ["2"]]
    assert {edge.type for node in graph.node for edge in node.input} == {
        model_pb2.InputProto.DATA_EDGE
    }
    parameters = {p.name: p.type for p in graph.parameters}
    assert set(parameters) == {"conv1.weight", "outside.1.0", "gone-op7"}
    weight = parameters["conv1.weight"]
    assert weight.data_type == model_pb2.DT_TENSOR
    assert weight.tensor_type.elem_type == model_pb2.DT_FLOAT32
    assert [dim.size for dim in weight.tensor_type.shape.dim] == [2, 1, 3, 3]
    assert parameters["gone-op7"].tensor_type.elem_type == model_pb2.DT_UNDEFINED


def test_model_has_output_types():
    """One output is a tensor, several are a tuple, none is nothing."""
    one, several, none = (node.output_type for node in model(GRAPH).node)
    assert one.data_type == model_pb2.DT_TENSOR
    assert [dim.size for dim in one.tensor_type.shape.dim] == [8, 2, 6, 6]
    assert several.data_type == model_pb2.DT_TUPLE
    kinds = [kind.tensor_type.elem_type for kind in several.sequence_type.elem_types]
    assert kinds == [model_pb2.DT_BFLOAT16, model_pb2.DT_INT64]
    assert none.data_type == model_pb2.DT_UNDEFINED


def test_graph_outputs_are_nodes_without_readers():
    """The last node of each chain."""
    assert [(output.name) for output in model(GRAPH).outputs] == ["3"]


def test_model_attributes_are_texts():
    """In the order of their names."""
    attributes = model(GRAPH).node[0].attribute
    assert [(a.name, a.value.str_val) for a in attributes] == [
        ("bias", "False"),
        ("stride", "(1, 1)"),
    ]
    assert {a.value.dtype for a in attributes} == {model_pb2.DT_STRING}


def test_model_stack_has_innermost_line_first():
    """As in MindSpore's own files."""
    node, other, _ = model(GRAPH).node
    assert node.source_address.splitlines() == [
        "      # In file /data/net.py:7/return self.conv1(x)/",
        "      # In file /data/train.py:16/loss = net(x)/",
    ]
    assert other.source_address == ""


@pytest.mark.parametrize(
    ("dtype", "number", "label"),
    [
        ("bool", 1, "Bool"),
        ("int8", 2, "Int8"),
        ("int16", 3, "Int16"),
        ("int32", 4, "Int32"),
        ("int64", 5, "Int64"),
        ("uint8", 6, "UInt8"),
        ("uint16", 7, "UInt16"),
        ("uint32", 8, "UInt32"),
        ("uint64", 9, "UInt64"),
        ("float16", 10, "Float16"),
        ("float32", 11, "Float32"),
        ("float64", 12, "Float64"),
        ("bfloat16", 46, "BFloat16"),
        ("complex64", 0, "Complex64"),
        ("float8_e4m3fn", 0, "float8_e4m3fn"),
    ],
)
def test_find_element_type_returns_number_and_label(dtype, number, label):
    """Numbers are those of MindSpore's enumeration; other types keep their names."""
    graph = OperatorGraph(0, (GraphNode("a", "A", (), (TensorType(dtype, (2,)),)),))
    assert model(graph).node[0].output_type.tensor_type.elem_type == number
    assert f"      : () -> (<Tensor[{label}], (2)>)" in ir(graph)


def test_ir_contains_operator():
    """Operator, types, name and stack, the outermost call first."""
    lines = ir(GRAPH)
    at = lines.index("subgraph @kernel_graph3() {")
    assert lines[at + 1 :] == [
        "  %0(CNode_0) = Conv2d(%para2_outside.1.0, %para1_conv1.weight)"
        ' {bias: "False", stride: "(1, 1)"}',
        "      : (<Tensor, NoShape>, <Tensor[Float32], (2, 1, 3, 3)>)"
        " -> (<Tensor[Float32], (8, 2, 6, 6)>)",
        f"      # Fullname with scope: ({CONV})",
        "      # In file /data/train.py:16/loss = net(x)/",
        "      # In file /data/net.py:7/return self.conv1(x)/",
        "  %1(CNode_1) = Split(%0, %para3_gone-op7)",
        "      : (<Tensor[Float32], (8, 2, 6, 6)>, <Tensor, NoShape>)"
        " -> (<Tuple[Tensor[BFloat16], Tensor[Int64]], TupleShape((4, 2), ())>)",
        f"      # Fullname with scope: ({SPLIT})",
        "  %2(CNode_2) = Print(%1)",
        "      : (<Tuple[Tensor[BFloat16], Tensor[Int64]], TupleShape((4, 2), ())>)"
        " -> (<Tensor, NoShape>)",
        "      # Fullname with scope: (Default/network-Net/Print-op0)",
        "  Return(%2)",
        "}",
    ]


def test_ir_begins_like_file_of_mindspore():
    """With the entry, and every parameter on a line."""
    assert ir(GRAPH)[:8] == [
        "# IR entry: @kernel_graph3",
        "# Total subgraphs: 1",
        "",
        "# Total params: 3",
        "# Params:",
        "%para1_conv1.weight: <Tensor[Float32], (2, 1, 3, 3)>",
        "%para2_outside.1.0: <Tensor, NoShape>",
        "%para3_gone-op7: <Tensor, NoShape>",
    ]


def test_find_source_reads_rendered_ir():
    """The reader's side of the same file: names and stacks come back."""
    found = list(parse_ir_operators(f"{line}\n" for line in ir(GRAPH)))
    assert [operator.op_name for operator in found] == [node.name for node in GRAPH.nodes]
    assert [operator.op_type for operator in found] == ["Conv2d", "Split", "Print"]
    frames = [(frame.file, frame.line, frame.code) for frame in found[0].frames]
    assert frames == [(line.file, line.line, line.code) for line in STACK]


def test_ir_keeps_hostile_texts_on_their_line():
    """Nothing in a name or a line of code makes a line of its own."""
    bad = "a\n      # Fullname with scope: (x)\r"
    node = GraphNode(bad, bad, (bad,), (), {bad: bad}, (SourceLine(bad, 1, bad, bad),))
    whole = render_graph(OperatorGraph(0, (node,)), PROFILES["ms2.3"])
    text = whole["ms_output_trace_code_graph_0.ir"].decode()
    named = [line for line in text.split("\n") if line.startswith("      # Fullname")]
    assert named == ["      # Fullname with scope: (a_      # Fullname with scope: (x)_)"]
    assert "\r" not in text
    assert len(model(OperatorGraph(0, (node,))).node[0].source_address.splitlines()) == 1


def test_empty_graph_can_be_rendered():
    """A graph without nodes loads as one."""
    assert len(model(OperatorGraph(0, ())).node) == 0


def test_rendering_is_deterministic():
    """Drawing again after a restart changes no byte."""
    assert render_graph(GRAPH, PROFILES["ms2.3"]) == render_graph(GRAPH, PROFILES["ms2.3"])


class TestGraphAssembler:
    """Parts of several graphs, in any mixture."""

    @staticmethod
    def part(number: int, name: str, *, first: bool = False, last: bool = False) -> GraphPart:
        node = GraphNode(name, "A")
        parameter = GraphParameter(f"{name}.weight", TensorType("int8", ()))
        return GraphPart(OperatorGraph(number, (node,), (parameter,)), first=first, last=last)

    def test_keeps_parts_of_two_graphs_apart(self):
        """Each graph is complete with its own last part, and its tickets with it."""
        parts = GraphAssembler()
        tickets = [FrameId("s", n) for n in range(1, 5)]
        assert parts.add_part(tickets[0], self.part(0, "a", first=True)) is None
        assert parts.add_part(tickets[1], self.part(1, "x", first=True)) is None
        graph = parts.add_part(tickets[2], self.part(0, "b", last=True))
        assert graph is not None
        assert [node.name for node in graph.nodes] == ["a", "b"]
        assert [p.name for p in graph.parameters] == ["a.weight", "b.weight"]
        assert parts.forget_graph(0) == [tickets[0], tickets[2]]
        other = parts.add_part(tickets[3], self.part(1, "y", last=True))
        assert other is not None
        assert [node.name for node in other.nodes] == ["x", "y"]

    def test_first_part_begins_graph_anew(self):
        """A description that broke off is forgotten, but its frames are settled too."""
        parts = GraphAssembler()
        tickets = [FrameId("s", n) for n in (1, 2)]
        parts.add_part(tickets[0], self.part(0, "half", first=True))
        graph = parts.add_part(tickets[1], self.part(0, "whole", first=True, last=True))
        assert graph is not None
        assert [node.name for node in graph.nodes] == ["whole"]
        assert parts.forget_graph(0) == tickets
        assert parts.forget_graph(0) == []
