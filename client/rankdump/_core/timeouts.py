"""Timeouts of communication as a rank reads them, and hints that say how near a process group came
to one, with their JSON form. Pure. The variables are those of HCCL, torch_npu and NCCL.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from rankdump._core.json_values import read_json
from rankdump.errors import CorruptedError

HINTS_FILE = "timeout_hints.json"
"""Under `.dump_metadata` in the root of the tree."""


@dataclass(frozen=True, slots=True)
class GroupTimeout:
    """What a process group was made with."""

    group: str
    backend: str
    """`gloo`, `nccl`, `hccl`, ... in lower case."""
    timeout_us: int


@dataclass(frozen=True, slots=True)
class RankTimeouts:
    """All that one rank knows of its limits; the newest of a rank replaces those before."""

    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of the environment, those of VARIABLES that are set, as they are set."""
    groups: tuple[GroupTimeout, ...] = ()
    limits: Mapping[str, float] = field(default_factory=dict[str, float])
    """Limits that no variable says, in seconds, by name, as `hccl_timeout` of TF's session."""


TIMEOUT_VARIABLES: tuple[str, ...] = (
    "HCCL_EXEC_TIMEOUT",
    "HCCL_CONNECT_TIMEOUT",
    "HCCL_EVENT_TIMEOUT",
    "HCCL_OP_EXPANSION_MODE",
    "TORCH_HCCL_ASYNC_ERROR_HANDLING",
    "TORCH_HCCL_BLOCKING_WAIT",
    "TORCH_HCCL_ENABLE_MONITORING",
    "TORCH_HCCL_HEARTBEAT_TIMEOUT_SEC",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
)
"""Variables that set a limit, or decide whether one strikes (ascend-formats.md 6)."""


class HintLevel(str, Enum):
    """How much of the budget is used."""

    OK = "ok"
    WARNING = "warning"
    """Half of it, or more is to be expected."""
    EXCEEDED = "exceeded"


@dataclass(frozen=True, slots=True)
class TimeoutLimit:
    """A limit that is in force, and where it was read."""

    name: str
    """`HCCL_EXEC_TIMEOUT`, `timeout of init_process_group`, ..."""
    limit_us: int
    """0: it never strikes."""
    source: str
    """`environment`, `default of CANN`, `process group`, ..."""
    ranks: tuple[int, ...]
    """Those it holds for."""


@dataclass(frozen=True, slots=True)
class TimeoutHint:
    """How near a process group came to its timeout; the widest spread of arrivals counts."""

    job_id: str
    group: str
    backend: str
    level: HintLevel
    waiting: bool
    """Its members are waiting now: the spread still grows."""
    kind: str
    """Of the collective, as EventKind's name in lower case."""
    name: str
    iteration: int
    sequence: int
    first_rank: int
    """Who arrived first, and waited longest."""
    last_rank: int
    """Who arrived last, or has not arrived."""
    spread_us: int
    """How long the first waited for the last."""
    dump_us: int
    """How much of that dumping caused."""
    limit: TimeoutLimit | None
    """In force: the tightest one that covers the wait; None when none is known."""
    limits: tuple[TimeoutLimit, ...]
    """All that were found for members of the group."""
    projected_us: int
    """Widest spread to be expected by the last iteration that the plan selects."""
    projected_iteration: int
    """That iteration; -1 when the plan selects without end."""
    settings: tuple[str, ...]
    """Lines to set; empty when nothing has to be changed."""
    reason: str
    """One sentence: who waited for whom, how long, of what, and why the settings."""

    @property
    def share(self) -> float:
        """Part of the budget that is used; 0 without a limit that strikes."""
        if self.limit is None or not self.limit.limit_us:
            return 0.0
        return self.spread_us / self.limit.limit_us


def format_hints(hints: Iterable[TimeoutHint]) -> str:
    """Return the contents of HINTS_FILE, the job written last at the end."""
    return json.dumps({"version": 1, "hints": list(map(hint_to_json, hints))}, indent=1) + "\n"


def parse_hints(text: str) -> tuple[TimeoutHint, ...]:
    """Read HINTS_FILE back; DamagedError says what is wrong with it."""
    try:
        whole = json.loads(text)
        if whole["version"] != 1:
            raise CorruptedError(f"version {whole['version']!r} of the hints file is not supported")
        return tuple(map(hint_from_json, whole["hints"]))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CorruptedError(f"not a hints file: {error!r}") from None


def hint_to_json(hint: TimeoutHint) -> dict[str, Any]:
    """Return a hint as files and `--json` say it, with its share of the budget."""
    return asdict(hint) | {"level": hint.level.value, "share": round(hint.share, 4)}


def hint_from_json(value: Any) -> TimeoutHint:
    """Read a hint back; DamagedError says what is wrong with it."""
    try:
        return read_json(TimeoutHint, value, unknown=True)
    except ValueError as error:
        raise CorruptedError(f"not a hint: {error!r}") from None
