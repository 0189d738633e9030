"""One valid value of each kind of message."""

from __future__ import annotations

import numpy as np
from fuzz.streams import SESSION
from support.record_heads import head_of

from rankdump._core.black_box import FaultKind
from rankdump._core.events import (
    EventColumns,
    EventKind,
    Finding,
    FindingKind,
    ProcessGroup,
    RankEvent,
)
from rankdump._core.freeze_record import (
    FreezeReach,
    FrozenCause,
    JobFreeze,
    RelayedFreeze,
    UnreachedAgent,
)
from rankdump._core.graph import (
    GraphNode,
    GraphParameter,
    GraphPart,
    OperatorGraph,
    SourceLine,
    TensorType,
)
from rankdump._core.job_control import ControlAction, ControlAnswer, ControlOrder
from rankdump._core.plan import ContentSettings, DumpPlan, OutputSettings
from rankdump._core.record import StatisticRows, TensorKey, TensorKind, TensorSide
from rankdump._core.run_card import ModelSummary, RunCard
from rankdump._core.session_protocol import (
    CallStacks,
    ChangedPlan,
    IterationEnd,
    KernelArguments,
    MetadataItem,
    OperatorArguments,
    SessionEnd,
    SessionGrant,
    SessionRequest,
    SlabPlace,
)
from rankdump._core.status import (
    AgentStatus,
    ClockEstimate,
    IterationStatus,
    MergeStatus,
    MetricSample,
    OrderEntry,
    SessionState,
    SessionStatus,
    StatusView,
)
from rankdump._core.tensor_fingerprint import FINGERPRINT_BYTES
from rankdump._core.timeouts import GroupTimeout, HintLevel, RankTimeouts, TimeoutHint, TimeoutLimit

STAMP = 1_700_000_000_000_000
VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)
NAME = "Default/network-Net/fc-Dense/Add-op0"
KEY = TensorKey(0, "Net", 0, 3, STAMP, "Add", NAME, TensorSide.OUTPUT, 1)
HEAD = head_of(KEY, "float32", VALUES.shape, VALUES.nbytes, argument="args.0")
KIND = TensorKind(0, "Add", NAME, TensorSide.OUTPUT, 1, "float32", (2, 3), 24)
EVENTS = EventColumns.from_events(
    [
        RankEvent(0, 3, 0, 0, NAME, EventKind.OPERATOR, STAMP, STAMP + 5),
        RankEvent(
            0, 3, 1, 2, "all_reduce", EventKind(2), STAMP + 6, STAMP + 9, group="g", sequence=1
        ),
    ],
    (ProcessGroup("g", (0, 1)),),
)
TYPE = TensorType("float32", (2, 3))
NODE = GraphNode(
    NAME, "Add", ("x",), (TYPE,), {"axis": "1"}, (SourceLine("a.py", 7, "main", "x + y"),)
)
TIMEOUTS = RankTimeouts(
    {"HCCL_EXEC_TIMEOUT": "68"}, (GroupTimeout("g", "gloo", 5_000_000),), {"x": 1.5}
)
PLAN = DumpPlan(
    OutputSettings("/trees/a"), content=ContentSettings(saved="full", statistics=("max", "min"))
)
DECLARATIONS: tuple[MetadataItem, ...] = (
    StatisticRows(3, (KIND,), (STAMP,), ("5,0",)),
    StatisticRows(3, (KIND,), (STAMP,), ("5,0",), fingerprints=(bytes(FINGERPRINT_BYTES),)),
    EVENTS,
    TIMEOUTS,
    GraphPart(OperatorGraph(0, (NODE,), (GraphParameter("x", TYPE),)), first=True, last=True),
    KernelArguments(3, (OperatorArguments(0, "Add", NAME, {"axis": "1"}),)),
    CallStacks(3, ("NN_Conv2d_0_forward",), (0,), (("File a.py, line 7, in main, \n x + y",),)),
    ChangedPlan(3, PLAN),
    IterationEnd(3, 2, {"buffer_full": 1}, 12, 0, 4),
    SessionEnd(4, ("a note",)),
)
ORDER = ControlOrder(
    "order-1", "job", ControlAction.OPERATORS, ("conv", "name-regex(.*a)"), iteration=9
)
ORDER_ANSWER = ControlAnswer("order-1", True, 9, 1200, "", 3, "job", 1, SESSION, 9, "'a' is odd")
REQUEST = SessionRequest(
    job_id="job",
    session_id=SESSION,
    rank=0,
    world_size=2,
    device=0,
    host="host",
    pid=17,
    framework="torch 2.13.0",
    device_target="CPU",
    plan_json=b"{}",
    config_source=b"{}",
    wants_slab=True,
)
GRANT = SessionGrant(b"token", 7, 1 << 30, "", SlabPlace("/run/a.slab", 1 << 20), "")
LIMIT = TimeoutLimit("HCCL_EXEC_TIMEOUT", 68_000_000, "default", (0, 1))
HINT = TimeoutHint(
    job_id="job",
    group="g",
    backend="gloo",
    level=HintLevel.WARNING,
    waiting=False,
    kind="collective",
    name="all_reduce",
    iteration=3,
    sequence=1,
    first_rank=0,
    last_rank=1,
    spread_us=60_000_000,
    dump_us=5,
    limit=LIMIT,
    limits=(LIMIT,),
    projected_us=61_000_000,
    projected_iteration=9,
    settings=("HCCL_EXEC_TIMEOUT=136",),
    reason="rank 0 waited for rank 1",
)
FINDING = Finding(FindingKind.MISSING_MEMBER, 3, "rank 1 is missing", (1,), "g", 1, NAME, 4)
ENTRY = OrderEntry(
    0, 0, 3, (0, 1), "all_reduce", EventKind(2), "g", 1, STAMP, STAMP + 9, (), (1, 1), (0, 0), 6
)
SESSION_STATUS = SessionStatus(
    "job", SESSION, 0, 1, 0, "host", 17, SessionState.CLOSED, notes=("a note",)
)
BALANCE = IterationStatus("job", SESSION, 0, 3, True, 4, 1, 1, 1, {"disk_low": 1}, 24, 24, 5, 0, 3)
CARD = RunCard(
    command=("python", "train.py"),
    versions={"torch": "2.13"},
    environment={"OMP_NUM_THREADS": "1"},
    revision="ab" * 20,
    settings={"torch.initial_seed": "3"},
    models=(ModelSummary("Net", 2, 9, "0f", {"float32": 2}),),
    numbers={"learning_rate.0": "0.1", "loss": "nan"},
    digests={"batch.0": "0f", "random.cpu": "1f"},
    parameters={"w": "float32 00000000000000ff 0:2/4,0:8/8", "v": "float32 00000000000000fe"},
)
VIEW = StatusView(
    sessions=(SESSION_STATUS,),
    iterations=(BALANCE,),
    roots=("/trees/a",),
    findings=("a sentence",),
    agents=(AgentStatus("agent", "host", 0.5, True, ClockEstimate(3, 1, 0, True)),),
    merges=(MergeStatus("job", 1, 2),),
    hints=(HINT,),
    order_findings=(FINDING,),
)
SAMPLES = [MetricSample("rankdump_agent_records_total", 3.0, {"fate": "stored"})]
FREEZE = JobFreeze(
    *("job", 0, 3),
    FrozenCause(FaultKind.NON_FINITE, 3, "NaN in an output", 5, 0, "Linear", "Default/fc"),
)
RELAYED = RelayedFreeze(
    FREEZE, FreezeReach(2, 1, (UnreachedAgent("host", (1, 2), "it is late"),)), (FREEZE.cause,)
)
