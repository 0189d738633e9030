"""Record of a freeze of the black box: the cause, the steps of each rank, and the ranks that are
missing. Pure: values, JSON and names.

Each agent writes one file `.rankdump/black_box.{host}.{digest}.json` into the frozen tree, after
all other files: a JSON object with `version` (1) and the fields of `FreezeRecord`. Numbers of a
step are texts, because JSON has no NaN.
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
"""Folder beside the dump of a job that holds its frozen trees, one for each iteration."""
MAX_RECORD_BYTES = 1 << 30
"""Maximum size of a record; a larger file is not accepted as one."""
NO_FREEZE_REASON = "no reason was given"
"""Text of the cause if a person requests a freeze without giving a reason."""
_VERSION = 1
_RECORD_PATTERN = re.compile(r"black_box\.[A-Za-z0-9._-]+\.json")
_DIGEST_BYTES = 4


@dataclass(frozen=True, slots=True)
class FrozenCause:
    """Why a ring was frozen, or would have been frozen if it had not been frozen already."""

    kind: FaultKind
    iteration: int
    text: str
    """A sentence about the cause."""
    at_us: int
    """Time at which the agent learned of the cause, in microseconds since the epoch."""
    rank: int | None = None
    """Rank that found the cause; None if no rank did."""
    op_type: str = ""
    op_name: str = ""
    """Operator that the cause is about; empty if there is none."""
    side: str = ""
    slot: int = 0
    argument: str = ""
    source: str = ""
    """`file:line` of the script; empty if it is not known."""

    @property
    def identity(self) -> tuple[str, int, int, int]:
        """Values that identify the cause, even if a message has shortened its texts."""
        return *self.subject, self.at_us

    @property
    def subject(self) -> tuple[str, int, int]:
        """Values that say what the cause is about; a fault that continues has the same subject at a
        later time.
        """
        return self.kind.value, self.iteration, -1 if self.rank is None else self.rank


@dataclass(frozen=True, slots=True)
class JobFreeze:
    """One freeze of the black boxes of a job, the same for all agents of the job."""

    job_id: str
    attempt: int
    iteration: int
    """Iteration that the frozen tree is named after."""
    cause: FrozenCause
    refusal: str = ""
    """Clause that says why the reporting agent has not frozen its ranks; empty if it has."""

    @property
    def key(self) -> tuple[str, int, int]:
        """Job, attempt and iteration, which identify a freeze."""
        return self.job_id, self.attempt, self.iteration


@dataclass(frozen=True, slots=True)
class UnreachedAgent:
    """An agent that has ranks of a job and has not frozen them."""

    host: str
    ranks: tuple[int, ...]
    reason: str
    """Clause that says why the agent has not frozen its ranks."""


@dataclass(frozen=True, slots=True)
class FreezeReach:
    """Progress of a freeze, as far as the coordinator knows it."""

    agents: int = 0
    """Number of agents that have ranks of the attempt; 0 without a coordinator."""
    frozen_agents: int = 0
    """Number of these agents that have frozen their ranks."""
    unreached: tuple[UnreachedAgent, ...] = ()
    """Some of the agents that have not frozen their ranks, once they have had enough time."""

    @property
    def is_settled(self) -> bool:
        """Whether each agent has frozen its ranks, or has had enough time to do so."""
        return self.frozen_agents >= self.agents or bool(self.unreached)


@dataclass(frozen=True, slots=True)
class RelayedFreeze:
    """A freeze that the coordinator passes to the agents of a job."""

    freeze: JobFreeze
    reach: FreezeReach = field(default_factory=FreezeReach)
    later_causes: tuple[FrozenCause, ...] = ()
    """Causes that the coordinator has found since; agents add them to the causes of the freeze."""


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
    """Time stamp of the tensor in the table of statistics."""
    finite_before: int
    """Number of tensors that were measured before it in the step, all of them finite."""


@dataclass(frozen=True, slots=True)
class FrozenStep:
    """One step of a rank, without its pulses, which are in the iteration's table of statistics."""

    iteration: int
    started_us: int
    ended_us: int
    """Time in microseconds since the epoch on the rank's clock."""
    tensors: int = 0
    """Number of rows in the table."""
    fingerprints: int = 0
    """Number of rows with a fingerprint and all statistics; for the other rows the budget had no
    room, or their tensor was on an accelerator.
    """
    nonfinite: int = 0
    """Number of rows with NaN or infinities."""
    first_nonfinite: NonfiniteTensor | None = None
    gradient_norm: str = ""
    """Norm of all gradients of parameters: the root of the sum of their squares; empty if there are
    none.
    """
    largest: str = ""
    """Largest magnitude of a finite element; empty if there is none."""
    full_tensors: int = 0
    """Number of tensors that were kept in full and are in the tree."""
    left_out: int = 0
    """Number of tensors that were to be kept in full but for which the budgets of the rank had no
    room.
    """
    skipped: int = 0
    """Number of tensors that were not measured because of the time budget."""
    unfinished: bool = False
    numbers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Numbers by name: `loss`, `learning_rate.0`, and those that the script noted, as Python writes
    a float.
    """
    digests: Mapping[str, str] = field(default_factory=dict[str, str])
    stacks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Notes of watch rules, one sentence each."""
    calls: tuple[GroupCalls, ...] = ()
    """Progress of the rank in the collectives of its groups; with the members of the groups if the
    step had not ended.
    """


@dataclass(frozen=True, slots=True)
class FrozenRank:
    """A rank whose ring was frozen."""

    rank: int
    session_id: str
    pid: int
    state: SessionState
    """State of the rank's session at the time of the freeze."""
    ended_by: str = ""
    """How the process of a lost session ended, such as `SIGKILL` or `exit code 1`; empty if
    unknown.
    """
    held_steps: int = 0
    """Number of steps in the ring."""
    dropped_steps: int = 0
    """Number of steps that were dropped earlier because the agent's memory had no room."""
    held_tensors: int = 0
    """Number of full tensors in the ring."""
    tensor_bytes: int = 0
    """Bytes of the elements of these tensors."""
    dropped_tensors: int = 0
    """Number of full tensors that were dropped earlier because the agent's memory had no room,
    because they came after their step, or because they arrived incomplete.
    """
    steps: tuple[FrozenStep, ...] = ()
    """Steps of the rank, the oldest first."""


@dataclass(frozen=True, slots=True)
class MissingRank:
    """A rank that has no step in the freeze, for a known reason."""

    rank: int
    reason: str
    """Clause that says why the rank has no step."""


@dataclass(frozen=True, slots=True)
class AbsentRanks:
    """Consecutive ranks that have no step for the same reason."""

    first: int
    last: int
    reason: str


def join_missing_ranks(missing: Iterable[MissingRank]) -> list[AbsentRanks]:
    """Return missing ranks in ascending order; consecutive ranks with the same reason
    are joined.
    """
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
    """Everything that one agent knows about a freeze."""

    job_id: str
    attempt: int
    iteration: int
    host: str
    world_size: int
    frozen_us: int
    """Time at which the freeze began, in microseconds since the epoch on the agent's clock."""
    causes: tuple[FrozenCause, ...]
    """The first cause made the freeze begin; the others were found during it."""
    ranks: tuple[FrozenRank, ...] = ()
    missing: tuple[MissingRank, ...] = ()
    """Missing ranks of this agent, and of agents that the freeze has not reached. A rank that is in
    neither list has no session on this agent.
    """
    agents: int = 0
    """Number of agents with ranks of the attempt, as far as the coordinator knew; 0 without a
    coordinator.
    """
    frozen_agents: int = 0
    """Number of these agents that had frozen their ranks."""


def describe_cause(cause: FrozenCause) -> str:
    """Return a cause as one line: kind, rank, iteration, sentence, operator and source line."""
    where = f" [{cause.op_name}]" if cause.op_name else ""
    line = f", {cause.source}" if cause.source else ""
    who = f"rank {cause.rank}, " if cause.rank is not None else ""
    return f"{cause.kind.value}, {who}iteration {cause.iteration}: {cause.text}{where}{line}"


def make_record_name(host: str, agent: str) -> str:
    """Return the name of an agent's record file; `agent` distinguishes the agents of one host."""
    digest = hashlib.blake2b(f"{host}\0{agent}".encode(), digest_size=_DIGEST_BYTES).hexdigest()
    spelled = re.sub(r"[^A-Za-z0-9-]", "_", host)[:128] or "_"
    return f"black_box.{spelled}.{digest}.json"


def is_record_name(name: str) -> bool:
    """Return whether a file with this name is a record of a freeze."""
    return _RECORD_PATTERN.fullmatch(name) is not None


def format_freeze_record(record: FreezeRecord) -> bytes:
    """Return a record as the bytes of its file."""
    body = {"version": _VERSION, **make_plain(record)}
    return json.dumps(body, default=make_plain).encode() + b"\n"


def parse_freeze_record(data: bytes) -> FreezeRecord:
    """Parse the bytes of a record's file; CorruptedError names the fault."""
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
    """Raise ValueError if a text of the record that stands for a number is not one."""
    for rank in record.ranks:
        for step in rank.steps:
            for text in (step.gradient_norm or "0", step.largest or "0", *step.numbers.values()):
                float(text)
