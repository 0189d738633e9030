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
    """Chosen by the client; unique for ever."""
    rank: int
    world_size: int
    device: int
    """Local device id, as in `support_device`."""
    host: str
    pid: int
    framework: str
    """Name and version, as `torch 2.13.0`."""
    device_target: str
    """`CPU`, `GPU` or `Ascend`."""
    plan_json: bytes
    config_source: bytes
    """The user's configuration file, byte for byte."""
    wants_slab: bool = False
    """The rank can map shared memory of this host."""
    secret: bytes = field(default=b"", repr=False)
    """Chosen by the client, and required to resume the session; inside the agent its SHA-256."""
    slab_version: int = 0
    """Newest format of a slab that the rank can write; 0 from clients without a journal."""
    attempt: int = 0
    """How often the launcher had restarted the job; inside the agent the number of the attempt."""
    is_elastic: bool = False
    """The launcher restarts all ranks together, and `attempt` is its count."""
    started_us: int = 0
    """When the rank began the session, on the clock of its records; 0 from older clients."""
    process_us: int = 0
    """When its process loaded the library: with host and pid it names the process."""
    takes_orders: bool = False
    """The rank answers orders that control its job; not so one of an earlier release."""


@dataclass(frozen=True, slots=True)
class SlabPlace:
    """Shared memory of one session."""

    path: str
    length: int
    """Bytes of the whole file."""


@dataclass(frozen=True, slots=True)
class SessionGrant:
    """The agent's answer to a request."""

    token: bytes
    acknowledged: int
    """Everything up to this sequence number is already accounted for."""
    max_record_bytes: int
    excluded: str = ""
    """Why the plan selects nothing on this rank; empty when it selects something."""
    slab: SlabPlace | None = None
    """Where frames go instead of the stream, when the agent offers it."""
    redirect: str = ""
    """Where to open it instead: a name beside the socket, or a port of its host; empty for here."""
    opening: str = ""
    """Why the session is not open yet and must be requested again; empty when it is open."""
    keeps_steps: bool = False
    """The agent keeps the steps of the session's black box; not so one of an earlier release."""
    keeps_step_tensors: bool = False
    """The agent keeps tensors of the black box in full; not so one of an earlier release."""
    changes_plans: bool = False
    """The agent reads frames that change the plan; not so one of an earlier release."""


class RecordHead(NamedTuple):
    """One tensor of one iteration, without its bytes.

    A NamedTuple, which is made fastest: there is one for each tensor.
    """

    kind: TensorKind
    """With the name of its model as folders spell it."""
    iteration: int
    timestamp_us: int
    """Microseconds since the epoch, rising and unique within a rank."""
    rank: int = 0
    """It is not sent: the agent knows it from the session."""
    task: int = 0
    stream: int = 0
    switched_on: bool = False
    """The script itself switched dumping on: the plan's iterations do not matter."""

    @property
    def byte_count(self) -> int:
        """Length of the elements in C order, little endian."""
        return self.kind.byte_count

    @property
    def key(self) -> TensorKey:
        """Identity of the tensor in its tree; made on each call, as only file names need it."""
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
    """Arguments that an operator was configured with, each value as text."""

    graph: int
    op_type: str
    op_name: str
    values: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class KernelArguments:
    """Arguments of operators that ran in an iteration."""

    iteration: int
    operators: tuple[OperatorArguments, ...]


@dataclass(frozen=True, slots=True)
class CallStacks:
    """Stacks of calls of an API, in order; a frame holds each stack once."""

    iteration: int
    calls: tuple[str, ...]
    """Names of operators, as in the keys of their tensors; at most MAX_FRAME_ROWS."""
    stacks: tuple[int, ...]
    """For each call the index of its stack in `texts`."""
    texts: tuple[tuple[str, ...], ...]
    """Lines of each stack, innermost first, as a file has them."""


@dataclass(frozen=True, slots=True)
class IterationEnd:
    """End of an iteration that the plan selects, on one rank."""

    iteration: int
    expected: int
    """Tensors that the plan selected, stored or not."""
    dropped: Mapping[str, int] = field(default_factory=dict[str, int])
    """Those that never became a record, by reason."""
    stall_us: int = 0
    """Time the training thread was held up by dumping."""
    first_position: int = 0
    last_position: int = 0
    """Positions in the rank's program that belong to it; both 0 when none are counted."""
    card: bytes = b""
    """The run card, as JSON; empty without one."""


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """End of a session, sent by its rank."""

    iterations_seen: int
    notes: tuple[str, ...] = ()
    raised_in: int | None = None
    """The iteration in which an error ended the session; None when none did."""


@dataclass(frozen=True, slots=True)
class ChangedPlan:
    """The plan of all frames behind this one."""

    iteration: int
    """First iteration with this plan."""
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
    """Every frame up to `sequence` is accounted for."""

    sequence: int
    draining: bool = False
    """The agent is about to stop: finish the stream and come back later."""
    warnings: tuple[str, ...] = ()
    """Lines for the rank's log, each to be written once."""
    slab_ready: bool = False
    """Shared memory is there now: finish the stream and open the session again."""
    freeze: FreezeNotice | None = None
    """The black box was frozen: send what there is of the running step."""
    orders: tuple[ControlOrder, ...] = ()
    """Orders that control the job, each to be answered."""
