"""Record of a freeze of the black box: why it was frozen, what each rank had, and which ranks are
missing. Pure: values, JSON and names.

Each agent writes one file `.rankdump/black_box.{host}.{digest}.json` into the frozen tree, after
everything else: an object with `version` (1) and the fields of `FreezeRecord`. Numbers of a step
are texts, because JSON has no NaN.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

from rankdump._core.black_box import FaultKind, GroupCalls
from rankdump._core.json_values import make_plain, read_json
from rankdump._core.status import SessionState
from rankdump.errors import CorruptedError

BLACK_BOX_FOLDER = "blackbox"
"""Folder beside the dump of a job with its frozen trees, one for each iteration."""
MAX_RECORD_BYTES = 1 << 30
"""A larger file is not a record of a freeze."""
NO_FREEZE_REASON = "no reason was given"
"""Text of the cause of people who say none."""
_VERSION = 1
_RECORD_PATTERN = re.compile(r"black_box\.[A-Za-z0-9._-]+\.json")
_DIGEST_BYTES = 4


@dataclass(frozen=True, slots=True)
class FrozenCause:
    """Why the ring was frozen, or would have been if it had not been already."""

    kind: FaultKind
    iteration: int
    text: str
    """A sentence."""
    at_us: int
    """When the agent learned it, in microseconds since the epoch."""
    rank: int | None = None
    """None when no rank found it."""
    op_type: str = ""
    op_name: str = ""
    """The operator that it is about; empty when it is about none."""
    side: str = ""
    slot: int = 0
    argument: str = ""
    source: str = ""
    """`file:line` of the script; empty when it is not known."""

    @property
    def identity(self) -> tuple[str, int, int, int]:
        """What tells it from others, whatever a message has made of its texts."""
        return *self.subject, self.at_us

    @property
    def subject(self) -> tuple[str, int, int]:
        """What it is about: a fault that goes on has the same one at another time."""
        return self.kind.value, self.iteration, -1 if self.rank is None else self.rank


@dataclass(frozen=True, slots=True)
class JobFreeze:
    """One freeze of the black boxes of a job: the same for all its agents."""

    job_id: str
    attempt: int
    iteration: int
    """Names the frozen tree."""
    cause: FrozenCause
    refusal: str = ""
    """Why the agent that reports it has not frozen its ranks, a clause; empty when it has."""

    @property
    def key(self) -> tuple[str, int, int]:
        """Job, attempt and iteration: a job is frozen once for each."""
        return self.job_id, self.attempt, self.iteration


@dataclass(frozen=True, slots=True)
class UnreachedAgent:
    """An agent that has not frozen the ranks that it has of a job."""

    host: str
    ranks: tuple[int, ...]
    reason: str
    """A clause."""


@dataclass(frozen=True, slots=True)
class FreezeReach:
    """How far a freeze has come, as the coordinator knows it."""

    agents: int = 0
    """Agents with ranks of the attempt; 0 without a coordinator."""
    frozen_agents: int = 0
    """Those of them that have frozen it."""
    unreached: tuple[UnreachedAgent, ...] = ()
    """Some of the others, as soon as they have had time to."""

    @property
    def is_settled(self) -> bool:
        """Whether all agents have frozen it, or had time to."""
        return self.frozen_agents >= self.agents or bool(self.unreached)


@dataclass(frozen=True, slots=True)
class RelayedFreeze:
    """A freeze that the coordinator hands to the agents of its job."""

    freeze: JobFreeze
    reach: FreezeReach = field(default_factory=FreezeReach)
    later_causes: tuple[FrozenCause, ...] = ()
    """What the coordinator itself has found since: agents add it to the causes of the freeze."""


@dataclass(frozen=True, slots=True)
class NonfiniteTensor:
    """The first tensor of a step that had NaN or infinities."""

    op_type: str
    op_name: str
    side: str
    slot: int
    argument: str
    nans: int
    infinities: int
    at_us: int
    """Its time in the table."""
    finite_before: int
    """Tensors that were measured before it in the step, all of them finite."""


@dataclass(frozen=True, slots=True)
class FrozenStep:
    """One step of a rank, without its rows, which are in the table of the iteration."""

    iteration: int
    started_us: int
    ended_us: int
    """Microseconds since the epoch on the rank's clock."""
    tensors: int = 0
    """Rows in the table."""
    fingerprints: int = 0
    """Rows that have a fingerprint and all statistics; the budget had no room for the others, or
    their tensor was on an accelerator."""
    nonfinite: int = 0
    """Rows with NaN or infinities."""
    first_nonfinite: NonfiniteTensor | None = None
    gradient_norm: str = ""
    """Root of the sum of squares of all gradients of parameters; empty without any."""
    largest: str = ""
    """Largest magnitude of a finite element; empty without any."""
    full_tensors: int = 0
    """Tensors that were kept in full, and are in the tree."""
    left_out: int = 0
    """Tensors that were to be kept in full, and for which the budgets of the rank had no room."""
    skipped: int = 0
    """Tensors that were not measured, because of the budget."""
    unfinished: bool = False
    numbers: Mapping[str, str] = field(default_factory=dict[str, str])
    """`loss`, `learning_rate.0`, and what the script noted, as Python writes a float."""
    digests: Mapping[str, str] = field(default_factory=dict[str, str])
    stacks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What watch rules noted, a sentence each."""
    calls: tuple[GroupCalls, ...] = ()
    """How far the rank had come in the collectives of its groups; with the members of the groups
    where the step had not ended."""


@dataclass(frozen=True, slots=True)
class FrozenRank:
    """A rank whose ring was frozen."""

    rank: int
    session_id: str
    pid: int
    state: SessionState
    """Of its session at the time of the freeze."""
    ended_by: str = ""
    """How the process of a lost session ended: `SIGKILL`, `exit code 1`; empty when unknown."""
    held_steps: int = 0
    """Steps that the ring had."""
    dropped_steps: int = 0
    """Steps that were dropped before because the agent's memory had no room for them."""
    held_tensors: int = 0
    """Tensors in full that the ring had."""
    tensor_bytes: int = 0
    """Of their elements."""
    dropped_tensors: int = 0
    """Tensors in full that were dropped before for the same reason, came after their step, or did
    not come to their end."""
    steps: tuple[FrozenStep, ...] = ()
    """The oldest first."""


@dataclass(frozen=True, slots=True)
class MissingRank:
    """A rank of which there is no step, and of which the reason is known."""

    rank: int
    reason: str
    """A clause."""


@dataclass(frozen=True, slots=True)
class AbsentRanks:
    """Consecutive ranks without a step, for one reason."""

    first: int
    last: int
    reason: str


def join_missing_ranks(missing: Iterable[MissingRank]) -> list[AbsentRanks]:
    """Return missing ranks in their order, consecutive ones with the same reason as one."""
    joined: list[AbsentRanks] = []
    for each in sorted(missing, key=lambda each: each.rank):
        before = joined[-1] if joined else None
        if before and (before.last + 1, before.reason) == (each.rank, each.reason):
            joined[-1] = AbsentRanks(before.first, each.rank, each.reason)
        else:
            joined.append(AbsentRanks(each.rank, each.rank, each.reason))
    return joined


def describe_absence(absent: AbsentRanks) -> str:
    """Return a sentence about missing ranks."""
    if absent.first == absent.last:
        return f"rank {absent.first} is missing: {absent.reason}"
    return f"ranks {absent.first}-{absent.last} are missing: {absent.reason}"


@dataclass(frozen=True, slots=True)
class FreezeRecord:
    """What one agent knows about a freeze."""

    job_id: str
    attempt: int
    iteration: int
    host: str
    world_size: int
    frozen_us: int
    """When the freeze began, in microseconds since the epoch on the agent's clock."""
    causes: tuple[FrozenCause, ...]
    """The first one is the cause; the others were found while it was being frozen."""
    ranks: tuple[FrozenRank, ...] = ()
    missing: tuple[MissingRank, ...] = ()
    """Those of this agent, and of agents that the freeze has not reached. Ranks in neither list
    have no session on this agent."""
    agents: int = 0
    """Agents with ranks of the attempt, as far as the coordinator knew; 0 without one."""
    frozen_agents: int = 0
    """Those of them that had frozen it."""


def describe_cause(cause: FrozenCause) -> str:
    """Return a cause in one line: kind, rank, iteration, sentence, operator and source line."""
    where = f" [{cause.op_name}]" if cause.op_name else ""
    line = f", {cause.source}" if cause.source else ""
    who = f"rank {cause.rank}, " if cause.rank is not None else ""
    return f"{cause.kind.value}, {who}iteration {cause.iteration}: {cause.text}{where}{line}"


def make_record_name(host: str, agent: str) -> str:
    """Return the name of the file of an agent; `agent` tells agents of one host apart."""
    digest = hashlib.blake2b(f"{host}\0{agent}".encode(), digest_size=_DIGEST_BYTES).hexdigest()
    spelled = re.sub(r"[^A-Za-z0-9-]", "_", host)[:128] or "_"
    return f"black_box.{spelled}.{digest}.json"


def is_record_name(name: str) -> bool:
    """Return whether a file of that name is a record of a freeze."""
    return _RECORD_PATTERN.fullmatch(name) is not None


def format_freeze_record(record: FreezeRecord) -> bytes:
    """Return the bytes of a file."""
    body = {"version": _VERSION, **make_plain(record)}
    return json.dumps(body, default=make_plain).encode() + b"\n"


def parse_freeze_record(data: bytes) -> FreezeRecord:
    """Read a file back; CorruptedError names what is wrong with it."""
    try:
        body = json.loads(data)
        if type(body) is not dict or cast("dict[str, object]", body).get("version") != _VERSION:
            raise ValueError(f"it is no object with the version {_VERSION}")
        value = cast("object", body)
        record = read_json(FreezeRecord, value, defaults=True, unknown=True, minimum=0)
        if not record.causes:
            raise ValueError("it has no cause")
        _check_numbers(record)
    except (ValueError, RecursionError) as error:
        raise CorruptedError(f"not a record of a freeze: {error}") from None
    return record


def _check_numbers(record: FreezeRecord) -> None:
    """Raise ValueError for a text that is not a number."""
    for rank in record.ranks:
        for step in rank.steps:
            for text in (step.gradient_norm or "0", step.largest or "0", *step.numbers.values()):
                float(text)
