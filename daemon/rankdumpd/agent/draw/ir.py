"""A graph as MindSpore's `.ir` text: a line per operator, its types, name and stack below. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from rankdump.contract.graph import GraphNode, TensorType
from rankdump.contract.key import one_line
from rankdumpd.agent.draw.edges import Linked, Source
from rankdumpd.agent.draw.source import stack_lines
from rankdumpd.agent.draw.types import kind_of, shape_text


def ir_text(graph: Linked, name: str) -> str:
    """Return the whole file."""
    places = {parameter: at + 1 for at, parameter in enumerate(graph.parameters)}
    lines = [
        f"# IR entry: @{name}",
        "# Total subgraphs: 1",
        "",
        f"# Total params: {len(places)}",
        "# Params:",
        *(
            f"{_reference(parameter, places)}: {_types(() if kind is None else (kind,))}"
            for parameter, kind in graph.parameters.items()
        ),
        "",
        f"subgraph @{name}() {{",
        *(line for at in range(len(graph.nodes)) for line in _node(graph, at, places)),
        f"  Return({', '.join(f'%{at}' for at in graph.ends)})",
        "}",
    ]
    return "".join(f"{line}\n" for line in lines)


def _node(graph: Linked, at: int, places: Mapping[str, int]) -> Iterator[str]:
    node, sources = graph.nodes[at], graph.inputs[at]
    inputs = ", ".join(_reference(source, places) for source in sources)
    given = ", ".join(_types(graph.types_of(source)) for source in sources)
    yield f"  %{at}(CNode_{at}) = {one_line(node.op_type)}({inputs}){_attributes(node)}"
    yield f"      : ({given}) -> ({_types(node.outputs)})"
    yield f"      # Fullname with scope: ({one_line(node.name)})"
    for line in stack_lines(node.source):
        yield f"      {line}"


def _reference(source: Source, places: Mapping[str, int]) -> str:
    return f"%{source}" if isinstance(source, int) else f"%para{places[source]}_{one_line(source)}"


def _attributes(node: GraphNode) -> str:
    if not node.attributes:
        return ""
    pairs = (
        f"{one_line(key)}: {json.dumps(text, ensure_ascii=False)}"
        for key, text in sorted(node.attributes.items())
    )
    return f" {{{one_line(', '.join(pairs))}}}"


def _types(outputs: Sequence[TensorType]) -> str:
    if not outputs:
        return "<Tensor, NoShape>"
    if len(outputs) == 1:
        return f"<Tensor[{kind_of(outputs[0].dtype).label}], {shape_text(outputs[0])}>"
    labels = ", ".join(f"Tensor[{kind_of(kind.dtype).label}]" for kind in outputs)
    shapes = ", ".join(map(shape_text, outputs))
    return f"<Tuple[{labels}], TupleShape({shapes})>"
