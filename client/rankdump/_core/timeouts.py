"""Timeouts of communication on a rank, and hints that say how near a process group came to a
timeout, with their JSON form. Pure. The variables are those of HCCL, torch_npu and NCCL.
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
"""Name of the file of hints under `.dump_metadata` in the root of the tree."""


@dataclass(frozen=True, slots=True)
class GroupTimeout:
    """Timeout that a process group was created with."""

    group: str
    backend: str
    """Backend of the group in lower case, such as `gloo`, `nccl` or `hccl`."""
    timeout_us: int


@dataclass(frozen=True, slots=True)
class RankTimeouts:
    """All timeouts of one rank; a newer value of the rank replaces the one before."""

    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    """Values of those TIMEOUT_VARIABLES that are set in the environment."""
    groups: tuple[GroupTimeout, ...] = ()
    limits: Mapping[str, float] = field(default_factory=dict[str, float])
    """Limits in seconds that no variable sets, by name, such as `hccl_timeout` of TensorFlow's
    session.
    """


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
"""Environment variables that set a limit or decide whether it is enforced (CANN, torch_npu and
PyTorch, environment variables).
"""


_EXECUTION_VARIABLE = "HCCL_EXEC_TIMEOUT"


def find_tightest_us(timeouts: RankTimeouts) -> int:
    """Return the tightest timeout, in microseconds, within which other ranks wait for this rank; 0
    if there is none.

    Among the variables only that of HCCL's collectives counts, in seconds (CANN, environment
    variables); a value that is not a number is ignored.
    """
    text = timeouts.variables.get(_EXECUTION_VARIABLE, "")
    seconds = [int(text)] if text.isascii() and text.isdigit() and len(text) < 10 else []
    known = [
        *(group.timeout_us for group in timeouts.groups),
        *(int(limit * 1e6) for limit in (*timeouts.limits.values(), *seconds)),
    ]
    return min((each for each in known if each > 0), default=0)


class HintLevel(str, Enum):
    """Level of a hint, by the share of the timeout that is used."""

    OK = "ok"
    WARNING = "warning"
    """Half of the timeout is used, or a larger share is expected."""
    EXCEEDED = "exceeded"


@dataclass(frozen=True, slots=True)
class TimeoutLimit:
    """A time limit that applies to ranks, and where it was read."""

    name: str
    """Name of the limit, such as `HCCL_EXEC_TIMEOUT` or `timeout of init_process_group`."""
    limit_us: int
    """The limit in microseconds; 0 if it is not enforced."""
    source: str
    """Origin of the limit, such as `environment`, `default of CANN` or `process group`."""
    ranks: tuple[int, ...]
    """Ranks that the limit applies to."""


@dataclass(frozen=True, slots=True)
class TimeoutHint:
    """Hint on how near a process group came to its timeout, by the widest spread of
    arrival times.
    """

    job_id: str
    group: str
    backend: str
    level: HintLevel
    waiting: bool
    """Whether members are waiting now, so that the spread still grows."""
    kind: str
    """Kind of the collective, such as `all_reduce`."""
    name: str
    iteration: int
    sequence: int
    first_rank: int
    """Rank that arrived first and waited longest."""
    last_rank: int
    """Rank that arrived last, or has not arrived."""
    spread_us: int
    """Microseconds for which the first rank waited for the last rank."""
    dump_us: int
    """Microseconds of the spread that dumping caused."""
    limit: TimeoutLimit | None
    """The tightest enforced limit that covers the wait; None if none is known."""
    limits: tuple[TimeoutLimit, ...]
    """All limits that were found for members of the group."""
    projected_us: int
    """Widest spread, in microseconds, that is expected up to the last iteration of the plan."""
    projected_iteration: int
    """Last iteration that the plan selects; -1 if the plan has no end."""
    settings: tuple[str, ...]
    """Settings to change, one line each; empty if nothing should be changed."""
    reason: str
    """Sentence that says which rank waited for which, how long, within which limit, and why the
    settings are recommended.
    """
    cause: str = ""
    """Why the wait cannot end, such as a deadlock: a longer timeout does not help then, so there
    are no settings. Empty for other waits.
    """

    @property
    def share(self) -> float:
        """Used share of the limit; 0 if no limit is enforced."""
        if self.limit is None or not self.limit.limit_us:
            return 0.0
        return self.spread_us / self.limit.limit_us


def format_hints(hints: Iterable[TimeoutHint]) -> str:
    """Return the contents of HINTS_FILE, which the coordinator writes at the end."""
    return json.dumps({"version": 1, "hints": list(map(hint_to_json, hints))}, indent=1) + "\n"


def parse_hints(text: str) -> tuple[TimeoutHint, ...]:
    """Parse HINTS_FILE; CorruptedError names the fault."""
    try:
        whole = json.loads(text)
        if whole["version"] != 1:
            raise CorruptedError(f"version {whole['version']!r} of the hints file is not supported")
        return tuple(map(hint_from_json, whole["hints"]))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CorruptedError(f"not a hints file: {error!r}") from None


def hint_to_json(hint: TimeoutHint) -> dict[str, Any]:
    """Return a hint as files and `--json` have it, with its used share of the limit."""
    return asdict(hint) | {"level": hint.level.value, "share": round(hint.share, 4)}


def hint_from_json(value: Any) -> TimeoutHint:
    """Parse a hint; CorruptedError names the fault."""
    try:
        return read_json(TimeoutHint, value, defaults=True, unknown=True)
    except ValueError as error:
        raise CorruptedError(f"not a hint: {error!r}") from None
