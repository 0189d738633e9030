"""What an adapter may ask of a session, what a session calls on it, and the events between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from rankdump.contract.events import EventKind, ProcessGroup
from rankdump.contract.graph import GraphNode, GraphParameter
from rankdump.contract.key import Side
from rankdump.contract.timeouts import GroupTimeout
from rankdump.values.tensors import Observation


@dataclass(frozen=True, slots=True)
class Collective:
    """What a collective or message is, beside its times."""

    kind: EventKind
    group: ProcessGroup
    sequence: int
    """Number in its group; of a message in its (group, sender, receiver)."""
    element_count: int = 0
    dtype: str = ""
    peer: int = -1
    """Global rank at the other end of a send or receive."""


@dataclass(slots=True, eq=False)
class Begun:
    """An event that has started; only the trace looks inside.

    Not frozen for one number, which is known late.
    """

    position: int
    start_us: int
    graph: int
    name: str
    collective: Collective | None
    stall_us: int
    """Of a collective: how long dumping had held the rank up by then."""
    iteration: int = -1
    """The one it was reported in while it was open; -1 as long as it was not."""


class Recorder(Protocol):
    """What an adapter may ask of a session.

    No method raises into the training job or holds it up longer than `block_timeout_s`.
    """

    @property
    def armed(self) -> bool:
        """Whether the plan selects the iteration that runs now on this rank."""
        ...

    def entered(self, graph: int, op_name: str) -> None:
        """Say that a forward call of an operator begins, before any tensor of it comes."""
        ...

    def wants(self, graph: int, op_name: str, side: Side) -> bool:
        """Return whether tensors of that operator and side are kept in this iteration."""
        ...

    def observe(self, observation: Observation) -> None:
        """Record a tensor of a side that `wants` has just said is kept."""
        ...

    def lose(
        self, graph: int, op_type: str, op_name: str, side: Side, slot: int, reason: str
    ) -> None:
        """Count a tensor of a side that `wants` has just said is kept, and that cannot be read."""
        ...

    def settled(self, graph: int, op_name: str, *, raised: bool = False) -> None:
        """Say that one call of an operator is over: all its tensors were handed over.

        A plan that keeps operators with an overflow, or the one that raised, decides here; one
        that watches operators reads them again.
        """
        ...

    def mark(self, graph: int, names: frozenset[str]) -> None:
        """Say which operators of a graph the script marked with `set_dump`.

        Names are scopes without the type and number of a call, as
        `network-Net/conv1-Conv2d`, and dotted names of parameters.
        """
        ...

    @property
    def describing(self) -> bool:
        """Whether operators are to be described now: in the first armed iteration."""
        ...

    def describe(self, graph: int, node: GraphNode) -> None:
        """Take an operator's part in the graph; the first description of a name counts."""
        ...

    def describe_parameter(self, graph: int, parameter: GraphParameter) -> None:
        """Take a parameter's part in the graph."""
        ...

    @property
    def wants_arguments(self) -> bool:
        """Whether the plan keeps the arguments of operators, in this iteration."""
        ...

    def arguments(self, graph: int, op_type: str, op_name: str, values: Mapping[str, str]) -> None:
        """Take what an operator was configured with, if the plan selects the operator."""
        ...

    def called(self, graph: int, op_name: str, stack: tuple[str, ...]) -> None:
        """Take where a selected call of an API came from: lines, innermost first.

        For trees with a file of stacks; any other has its stacks from `describe`.
        """
        ...

    def started(self, *, graph: int, name: str, collective: Collective | None = None) -> Begun:
        """Advance the rank's program by one event, which is to be finished whatever happens."""
        ...

    def finished(
        self, begun: Begun, *, name: str = "", collective: Collective | None = None
    ) -> None:
        """Record an event begun earlier as complete now; from any thread.

        Name and collective are given when only the end has shown them.
        """
        ...

    def limited(self, timeout: GroupTimeout) -> None:
        """Say what a process group that is used was made with, as often as is convenient."""
        ...

    def warn_once(self, message: str) -> None:
        """Log a warning the first time it is said."""
        ...


class IterationHook(Protocol):
    """What a session calls on an attached adapter."""

    def iteration_begins(self, iteration: int, armed: bool) -> None:
        """Install or remove what observes the job; called on the training thread."""
        ...

    def iteration_ends(self, iteration: int, armed: bool) -> None:
        """Hand over what is read at the end of an iteration, such as parameters."""
        ...

    def detach(self) -> None:
        """Leave the job as it was before."""
        ...
