"""A recorder that takes nothing: what counts calls has it while no dump runs."""

from __future__ import annotations

from collections.abc import Mapping

from rankdump.contract.graph import GraphNode, GraphParameter
from rankdump.contract.key import Side
from rankdump.contract.timeouts import GroupTimeout
from rankdump.values import Begun, Collective, Observation


class Silence:
    """A `Recorder` without a session."""

    armed = False
    describing = False
    wants_arguments = False

    def entered(self, graph: int, op_name: str) -> None:
        """Take nothing."""

    def wants(self, graph: int, op_name: str, side: Side) -> bool:
        """Return that nothing is kept."""
        return False

    def observe(self, observation: Observation) -> None:
        """Take nothing."""

    def lose(
        self, graph: int, op_type: str, op_name: str, side: Side, slot: int, reason: str
    ) -> None:
        """Count nothing."""

    def settled(self, graph: int, op_name: str, *, raised: bool = False) -> None:
        """Take nothing."""

    def mark(self, graph: int, names: frozenset[str]) -> None:
        """Take nothing."""

    def describe(self, graph: int, node: GraphNode) -> None:
        """Take nothing."""

    def describe_parameter(self, graph: int, parameter: GraphParameter) -> None:
        """Take nothing."""

    def arguments(self, graph: int, op_type: str, op_name: str, values: Mapping[str, str]) -> None:
        """Take nothing."""

    def called(self, graph: int, op_name: str, stack: tuple[str, ...]) -> None:
        """Take nothing."""

    def started(self, *, graph: int, name: str, collective: Collective | None = None) -> Begun:
        """Return an event that nobody counts."""
        return Begun(0, 0, graph, name, collective, 0)

    def finished(
        self, begun: Begun, *, name: str = "", collective: Collective | None = None
    ) -> None:
        """Take nothing."""

    def limited(self, timeout: GroupTimeout) -> None:
        """Take nothing."""

    def warn_once(self, message: str) -> None:
        """Say nothing: what is wrong is said when a dump runs."""
