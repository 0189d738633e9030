"""A graph to the bytes of the files MindSpore's tools know: `.ir` to read, `.pb` to load. Pure.

Source: mindspore-dump.md 2.12 and 5.5, what readers need of it: 7.1-7.4 there and
mindspore-observed.md 7, and the files of MindSpore 2.0 and 2.7 themselves.
"""

from __future__ import annotations

from rankdump.contract.graph import Graph
from rankdump.contract.layout.profile import Profile
from rankdumpd.agent.draw.edges import linked
from rankdumpd.agent.draw.ir import ir_text
from rankdumpd.agent.draw.model import model_bytes


def drawings(graph: Graph, profile: Profile) -> dict[str, bytes]:
    """Return the bytes of a graph's files by name."""
    name = _graph_name(graph.number, profile)
    file = f"ms_output_trace_code_graph_{graph.number}"
    found = linked(graph)
    return {
        f"{file}.ir": ir_text(found, name).encode(),
        f"{file}.pb": model_bytes(found, name),
    }


def _graph_name(number: int, profile: Profile) -> str:
    # MindInsight of the old names takes the graph's number from what follows the last `_`.
    return f"kernel_graph_{number}" if profile.short_names else f"kernel_graph{number}"
