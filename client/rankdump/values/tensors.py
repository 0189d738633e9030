"""A tensor from where it lies in the job until its bytes are a copy, and what is decided of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from rankdump.contract.exchange import RecordHead
from rankdump.contract.key import Side
from rankdump.contract.plan import Precision


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

    def accelerator(self) -> Accelerator | None:
        """Return what can copy the elements on its own; None when only the processor can."""
        ...

    def elements(self) -> memoryview | None:
        """Return the elements where they lie, C order, little endian; None if that needs a copy.

        They are the job's own: good until the caller returns to it, and never to be written.
        """
        ...

    def unordered(self) -> memoryview | None:
        """Return the elements where they lie, in any order; None where even that needs a copy.

        They are the job's own, as those of `elements` are.
        """
        ...

    def standing(self) -> Standing | None:
        """Return what tells whether the elements are still the same; None where nothing does."""
        ...

    def copied(self) -> bytes:
        """Return a copy of the elements, C order, little endian."""
        ...

    def head(self, count: int) -> TensorSource:
        """Return the first elements in C order, as a tensor of one dimension."""
        ...

    def finite(self) -> bool:
        """Return whether no element is NaN or infinite; always so for types that have none."""
        ...

    def changed(self) -> bool:
        """Return whether the elements are known to have changed since this source was made."""
        ...

    def memory(self) -> TensorSource:
        """Return a source that stays with the tensor's memory, and keeps nothing else alive."""
        ...

    def again(self) -> TensorSource | str:
        """Return the tensor as it is by now, or the reason why it cannot be read any more."""
        ...

    def figures(self, items: tuple[str, ...], precision: Precision) -> Deferred | None:
        """Start computing statistics on the accelerator; None when the tensor is in host memory."""
        ...


class Standing(NamedTuple):
    """A tensor as it stands: the same object, changed as often, has the same elements.

    Writes past the framework, through memory that is shared with another library, do not count.
    """

    thing: object
    """May be referred to weakly."""
    changes: int
    owner: object
    """The one whose memory it shows, changed as often: itself, or what it is a view of."""


class Accelerator(Protocol):
    """Copies one tensor's elements into host memory while the job goes on."""

    def pin(self, memory: memoryview) -> Callable[[], None] | None:
        """Make a stretch of host memory fit for that, for all tensors; None when it cannot be.

        Return what ends it.
        """
        ...

    def copy_into(self, target: memoryview) -> Transfer:
        """Begin to write the elements, C order, little endian, into a part of pinned memory.

        What the job does to the tensor from now on does not show.
        """
        ...


class Transfer(Protocol):
    """A copy that an accelerator makes on its own; any thread may ask."""

    def done(self) -> bool:
        """Return whether the elements are there; raise when they never will be."""
        ...


class Deferred(Protocol):
    """Statistics that are still on an accelerator."""

    def read(self, others: Sequence[Deferred]) -> list[tuple[str, ...]]:
        """Return the texts of these others of its own kind, read back all at once."""
        ...


class Observation(NamedTuple):
    """One tensor that an operator read or wrote; owned by the training job.

    A step has thousands of them: of all frozen values this sort is made fastest.
    """

    graph: int
    op_type: str
    op_name: str
    """Full scope name, components joined by `/`."""
    side: Side
    slot: int
    argument: str
    """Where in the call the tensor stood: `args.0`, `kwargs.mask`, `out.hidden`."""
    tensor: TensorSource
    state: bool = False
    """A weight, buffer or constant as it stands: no operator read or wrote it just now."""
    constant: bool = False
    """It never changes: kept once for its graph."""


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
    on_its_way: bool = False
    """It is in the agent's shared memory already: there is nothing left to send."""


class Placing(Enum):
    """What became of an attempt to copy a tensor straight into shared memory."""

    DONE = "done"
    FULL = "full"
    """There was no room, and patience ended."""
    ELSEWHERE = "elsewhere"
    """It has to go another way: no shared memory, or too large for one entry."""
