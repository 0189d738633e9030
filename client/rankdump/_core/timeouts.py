"""Timeouts of communication on a rank, and hints on how near a process group came to one, with
their JSON form. Pure. The variables are those of HCCL, torch_npu and NCCL.
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
    """Timeout that a process group was made with."""

    group: str
    backend: str
    """`gloo`, `nccl`, `hccl`, ... in lower case."""
    timeout_us: int


@dataclass(frozen=True, slots=True)
class RankTimeouts:
    """All timeouts of one rank; the newest value of a rank replaces those before."""

    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    """Values of the TIMEOUT_VARIABLES that are set in the environment."""
    groups: tuple[GroupTimeout, ...] = ()
    limits: Mapping[str, float] = field(default_factory=dict[str, float])
    """Limits set elsewhere, in seconds by name, such as `hccl_timeout` of TensorFlow's session."""


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
"""Variables that set a limit or decide whether it is enforced (CANN, torch_npu and PyTorch,
environment variables)."""


_EXECUTION_VARIABLE = "HCCL_EXEC_TIMEOUT"


def find_tightest_us(timeouts: RankTimeouts) -> int:
    """Return the tightest timeout within which other ranks wait for this one; 0 without one.

    Of the variables only that of HCCL's collectives counts, in seconds (CANN, environment
    variables); one that is not a number is ignored.
    """
    text = timeouts.variables.get(_EXECUTION_VARIABLE, "")
    seconds = [int(text)] if text.isascii() and text.isdigit() and len(text) < 10 else []
    known = [
        *(group.timeout_us for group in timeouts.groups),
        *(int(limit * 1e6) for limit in (*timeouts.limits.values(), *seconds)),
    ]
    return min((each for each in known if each > 0), default=0)


class HintLevel(str, Enum):
    """How much of the budget is used."""

    OK = "ok"
    WARNING = "warning"
    """Half of it is used, or a larger share is expected."""
    EXCEEDED = "exceeded"


@dataclass(frozen=True, slots=True)
class TimeoutLimit:
    """A limit that is in force, and where it was read."""

    name: str
    """`HCCL_EXEC_TIMEOUT`, `timeout of init_process_group`, ..."""
    limit_us: int
    """0: it is not enforced."""
    source: str
    """`environment`, `default of CANN`, `process group`, ..."""
    ranks: tuple[int, ...]
    """Ranks that it applies to."""


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
    """The rank that arrived first, and waited longest."""
    last_rank: int
    """The rank that arrived last, or has not arrived."""
    spread_us: int
    """How long the first rank waited for the last."""
    dump_us: int
    """Part of the spread that dumping caused."""
    limit: TimeoutLimit | None
    """In force: the tightest one that covers the wait; None when none is known."""
    limits: tuple[TimeoutLimit, ...]
    """All limits that were found for members of the group."""
    projected_us: int
    """Widest spread expected up to the last iteration that the plan selects."""
    projected_iteration: int
    """That iteration; -1 when the plan selects without end."""
    settings: tuple[str, ...]
    """Settings to change, a line each; empty for no change."""
    reason: str
    """One sentence: which rank waited for which, how long, of which limit, and why the settings."""
    cause: str = ""
    """Why the wait does not end, such as a deadlock: a longer timeout does not help, and there are
    no settings. Empty for other waits."""

    @property
    def share(self) -> float:
        """Part of the budget that is used; 0 without a limit that is enforced."""
        if self.limit is None or not self.limit.limit_us:
            return 0.0
        return self.spread_us / self.limit.limit_us


def format_hints(hints: Iterable[TimeoutHint]) -> str:
    """Return the contents of HINTS_FILE, the job written last at the end."""
    return json.dumps({"version": 1, "hints": list(map(hint_to_json, hints))}, indent=1) + "\n"


def parse_hints(text: str) -> tuple[TimeoutHint, ...]:
    """Read HINTS_FILE back; CorruptedError names what is wrong with it."""
    try:
        whole = json.loads(text)
        if whole["version"] != 1:
            raise CorruptedError(f"version {whole['version']!r} of the hints file is not supported")
        return tuple(map(hint_from_json, whole["hints"]))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CorruptedError(f"not a hints file: {error!r}") from None


def hint_to_json(hint: TimeoutHint) -> dict[str, Any]:
    """Return a hint as in files and `--json`, with its share of the budget."""
    return asdict(hint) | {"level": hint.level.value, "share": round(hint.share, 4)}


def hint_from_json(value: Any) -> TimeoutHint:
    """Read a hint back; CorruptedError names what is wrong with it."""
    try:
        return read_json(TimeoutHint, value, defaults=True, unknown=True)
    except ValueError as error:
        raise CorruptedError(f"not a hint: {error!r}") from None
