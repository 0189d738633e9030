"""The graph builder: parts, order, and limits of graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankdump._core.graph import (
    GraphNode,
    GraphParameter,
    GraphPart,
    OperatorGraph,
    SourceLine,
    TensorType,
)
from rankdump._recorder.metadata_sender import (
    MAX_PART_CHARACTERS,
    MAX_PART_NODES,
    GraphBuilder,
    split_graph,
)

WEIGHT = GraphParameter("w", TensorType("float32", (2,)))


def node(name: str, **fields) -> GraphNode:
    return GraphNode(name, "Add", **fields)


def names(parts: list[GraphPart]) -> list[str]:
    return [each.name for part in parts for each in part.graph.nodes]


@given(nodes=st.integers(0, 3 * MAX_PART_NODES), parameters=st.integers(0, 2 * MAX_PART_NODES))
def test_graph_parts_hold_the_graph_in_order(nodes, parameters):
    """Law: the parts together are the graph; the first and the last one are marked."""
    graph = OperatorGraph(
        number=3,
        nodes=tuple(node(f"n{n}") for n in range(nodes)),
        parameters=tuple(replace(WEIGHT, name=f"p{n}") for n in range(parameters)),
        compiled=True,
    )
    parts = list(split_graph(graph))
    assert [part.first for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert all(part.graph.number == 3 and part.graph.compiled for part in parts)
    assert all(len(part.graph.nodes) <= MAX_PART_NODES for part in parts)
    assert tuple(n for part in parts for n in part.graph.nodes) == graph.nodes
    assert tuple(p for part in parts for p in part.graph.parameters) == graph.parameters


def test_graph_parts_with_long_stacks_have_fewer_nodes():
    long = (SourceLine("f" * 1000, 1, "g", "c"),) * 30
    graph = OperatorGraph(0, tuple(node(f"n{n}", source=long) for n in range(100)))
    parts = list(split_graph(graph))
    assert len(parts) > 1
    for part in parts:
        text = sum(len(line.file) for each in part.graph.nodes for line in each.source)
        assert text <= MAX_PART_CHARACTERS


def test_graph_keeps_first_descriptions_and_is_sent_again_only_if_it_grew():
    sketch = GraphBuilder()
    sketch.add(0, node("a", inputs=("x",)))
    sketch.add(0, node("a", inputs=("y",)))
    sketch.add_parameter(0, WEIGHT)
    sketch.add(1, node("b"))
    parts = sketch.take_parts()
    assert [(p.graph.number, names([p])) for p in parts] == [(0, ["a"]), (1, ["b"])]
    assert parts[0].graph.nodes[0].inputs == ("x",)
    assert parts[0].graph.parameters == (WEIGHT,)
    sketch.add(0, node("a"))
    sketch.add_parameter(0, WEIGHT)
    assert sketch.take_parts() == []
    sketch.add(1, node("c"))
    assert names(sketch.take_parts()) == ["b", "c"]


@pytest.mark.parametrize("described_first", [True, False])
def test_graph_keeps_a_compiled_order_that_descriptions_complete(described_first):
    """Law: the framework's own order is the graph: nothing else enters it."""
    sketch = GraphBuilder()
    described = node("a", outputs=(TensorType("int8", ()),))
    compiled = [node("c"), node("a"), node("b"), node("c")]
    steps = [lambda: sketch.add(0, described), lambda: sketch.set_compiled_order(0, compiled)]
    for step in steps if described_first else reversed(steps):
        step()
    sketch.add(0, node("z"))
    (part,) = sketch.take_parts()
    assert part.graph.compiled
    assert part.graph.nodes == (node("c"), described, node("b"))


def test_graph_is_limited(monkeypatch):
    monkeypatch.setattr("rankdump._recorder.metadata_sender.MAX_NODES", 2)
    sketch = GraphBuilder()
    assert [sketch.add(0, node(name)) for name in "abca"] == [True, True, False, True]
    assert names(sketch.take_parts()) == ["a", "b"]
