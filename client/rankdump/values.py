"""The frozen values that the rooms of a training process hand to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rankdump.contract.events import EventKind, ProcessGroup
from rankdump.contract.exchange import RecordHead
from rankdump.contract.key import Side


class TensorSource(Protocol):
    """A tensor wherever it lies; reading its facts costs nothing, `copy_into` one copy."""

    @property
    def dtype(self) -> str:
        """Common name of the element type, as in `contract.dtypes`."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents, outermost first."""
        ...

    @property
    def byte_count(self) -> int:
        """Bytes of the elements, packed."""
        ...

    def copy_into(self, target: memoryview) -> None:
        """Write the elements into `byte_count` writable bytes, C order, little endian."""
        ...


@dataclass(frozen=True, slots=True)
class Observation:
    """One tensor that an operator read or wrote; owned by the training job."""

    graph: int
    op_type: str
    op_name: str
    """Full scope name, components joined by `/`."""
    side: Side
    slot: int
    argument: str
    """Where in the call the tensor stood: `args.0`, `kwargs.mask`, `out.hidden`."""
    tensor: TensorSource


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a tensor is kept, and why not."""

    keep: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Staged:
    """A record whose bytes no longer depend on the training job."""

    head: RecordHead
    data: memoryview


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


class Recorder(Protocol):
    """What an adapter may ask of a session.

    No method raises into the training job or holds it up longer than `block_timeout_s`.
    """

    @property
    def armed(self) -> bool:
        """Whether the plan selects the iteration that runs now on this rank."""
        ...

    def wants(self, op_name: str, side: Side) -> bool:
        """Return whether tensors of that operator and side are kept in this iteration."""
        ...

    def observe(self, observation: Observation) -> None:
        """Take one tensor, if the plan selects it."""
        ...

    def lose(self, op_name: str, side: Side, reason: str) -> None:
        """Count a tensor that could not be read, if the plan selects it."""
        ...

    def started(self) -> tuple[int, int]:
        """Advance the rank's program by one event; return its position and the time in us."""
        ...

    def finished(
        self,
        begun: tuple[int, int],
        *,
        graph: int,
        name: str,
        collective: Collective | None = None,
    ) -> None:
        """Record an event begun earlier as complete now; from any thread."""
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
