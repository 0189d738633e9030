"""Values that a rank and its agent exchange: request and grant of a session, heads of records,
metadata frames and acknowledgements. Pure values; `_wire` converts them to and from protobuf.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from rankdump._core.black_box import FreezeNotice
from rankdump._core.events import EventColumns
from rankdump._core.graph import GraphPart
from rankdump._core.job_control import ControlOrder
from rankdump._core.plan import DumpPlan
from rankdump._core.record import StatisticRows, TensorKey, TensorKind
from rankdump._core.timeouts import RankTimeouts


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """Request of a rank to open or resume its session."""

    job_id: str
    session_id: str
    """Id of the session, chosen by the client; never used again."""
    rank: int
    world_size: int
    device: int
    """Local device id, as used in `support_device`."""
    host: str
    pid: int
    framework: str
    """Name and version of the framework, such as `torch 2.13.0`."""
    device_target: str
    """Kind of device: `CPU`, `GPU` or `Ascend`."""
    plan_json: bytes
    config_source: bytes
    """The user's configuration file, byte for byte."""
    wants_slab: bool = False
    """Whether the rank can map shared memory of this host."""
    secret: bytes = field(default=b"", repr=False)
    """Secret that the client chooses and must present to resume the session; inside the agent its
    SHA-256.
    """
    slab_version: int = 0
    """Newest slab format that the rank can write; 0 from clients that write no journal."""
    attempt: int = 0
    """Number of restarts of the job by its launcher; inside the agent the number of the attempt."""
    is_elastic: bool = False
    """Whether the launcher restarts all ranks together and `attempt` is its count."""
    started_us: int = 0
    """Time at which the rank began the session, in microseconds on the clock of its records; 0 from
    older clients.
    """
    process_us: int = 0
    """Time at which the rank's process loaded the library, in microseconds; with host and pid it
    identifies the process.
    """
    takes_orders: bool = False
    """Whether the rank answers orders that control its job; ranks of earlier releases do not."""


@dataclass(frozen=True, slots=True)
class SlabPlace:
    """Shared memory of one session."""

    path: str
    length: int
    """Bytes of the whole slab file."""


@dataclass(frozen=True, slots=True)
class SessionGrant:
    """The agent's answer to the request for a session."""

    token: bytes
    acknowledged: int
    """Sequence number up to which all frames are accounted for already."""
    max_record_bytes: int
    excluded: str = ""
    """Why the plan selects nothing on this rank; empty if it selects something."""
    slab: SlabPlace | None = None
    """Shared memory that frames are written to instead of the stream; None if the agent offers
    none.
    """
    redirect: str = ""
    """Address where the session must be opened instead: a name beside the socket, or a port of the
    agent's host; empty for this agent.
    """
    opening: str = ""
    """Why the session is not open yet and must be requested again; empty if it is open."""
    keeps_steps: bool = False
    """Whether the agent keeps steps of the session's black box; agents of earlier
    releases do not.
    """
    keeps_step_tensors: bool = False
    """Whether the agent keeps full tensors of the black box; agents of earlier releases do not."""
    changes_plans: bool = False
    """Whether the agent reads frames that change the plan; agents of earlier releases do not."""


class RecordHead(NamedTuple):
    """Head of a record: one tensor of one iteration, without its elements.

    It is a NamedTuple because that is created fastest: there is one for each tensor.
    """

    kind: TensorKind
    """Kind of the tensor; its model's name is spelled as in folder names."""
    iteration: int
    timestamp_us: int
    """Time stamp in microseconds since the epoch, rising and unique within a rank."""
    rank: int = 0
    """Global rank; not sent, because the agent knows it from the session."""
    task: int = 0
    stream: int = 0
    switched_on: bool = False
    """Whether the script itself switched dumping on, so that the plan's iterations do
    not matter.
    """

    @property
    def byte_count(self) -> int:
        """Bytes of the elements in C order, little endian."""
        return self.kind.byte_count

    @property
    def key(self) -> TensorKey:
        """Identity of the tensor in its tree; made on each call, because only file
        names need it.
        """
        kind = self.kind
        return TensorKey(
            self.rank,
            kind.model,
            kind.graph,
            self.iteration,
            self.timestamp_us,
            kind.op_type,
            kind.op_name,
            kind.side,
            kind.slot,
            self.task,
            self.stream,
            constant=kind.constant,
        )


@dataclass(frozen=True, slots=True)
class OperatorArguments:
    """Arguments that one operator was configured with; each value is a text."""

    graph: int
    op_type: str
    op_name: str
    values: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class KernelArguments:
    """Arguments of several operators that ran in an iteration."""

    iteration: int
    operators: tuple[OperatorArguments, ...]


@dataclass(frozen=True, slots=True)
class CallStacks:
    """Call stacks of API calls, in order; each different stack is in the frame only once."""

    iteration: int
    calls: tuple[str, ...]
    """Names of the operators, as in the keys of their tensors; at most MAX_FRAME_ROWS."""
    stacks: tuple[int, ...]
    """Index in `texts` of the stack of each call."""
    texts: tuple[tuple[str, ...], ...]
    """Lines of each different stack, innermost call first, as the file has them."""


@dataclass(frozen=True, slots=True)
class IterationEnd:
    """End of an iteration that the plan selects, on one rank."""

    iteration: int
    expected: int
    """Number of tensors that the plan selected, whether they were stored or not."""
    dropped: Mapping[str, int] = field(default_factory=dict[str, int])
    """Number of these tensors that never became a record, by reason."""
    stall_us: int = 0
    """Microseconds for which dumping delayed the training thread."""
    first_position: int = 0
    last_position: int = 0
    """Last position of the iteration in the rank's program, after `first_position`; both are 0 if
    events are not counted.
    """
    card: bytes = b""
    """The run card as JSON; empty if there is none."""


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """End of a session, as its rank sends it."""

    iterations_seen: int
    notes: tuple[str, ...] = ()
    raised_in: int | None = None
    """Iteration in which an error ended the session; None if no error did."""


@dataclass(frozen=True, slots=True)
class ChangedPlan:
    """The plan that applies to all frames after this one."""

    iteration: int
    """First iteration that has this plan."""
    plan: DumpPlan


MetadataItem: TypeAlias = (
    EventColumns
    | StatisticRows
    | GraphPart
    | KernelArguments
    | CallStacks
    | RankTimeouts
    | IterationEnd
    | SessionEnd
    | ChangedPlan
)
"""Content of a numbered frame that is not a record."""


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """Message of the agent that all frames up to `sequence` are accounted for."""

    sequence: int
    draining: bool = False
    """Whether the agent is about to stop: the rank finishes the stream and connects again later."""
    warnings: tuple[str, ...] = ()
    """Lines for the rank's log, each of which is written once."""
    slab_ready: bool = False
    """Whether shared memory is available now: the rank finishes the stream and opens the session
    again.
    """
    freeze: FreezeNotice | None = None
    """Notice that the black box was frozen: the rank sends its running step as far as it was
    measured.
    """
    orders: tuple[ControlOrder, ...] = ()
    """Orders that control the job; the rank answers each of them."""
