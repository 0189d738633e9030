"""Admission of records by plan, disk and limits, from their heads alone; the limits of a host with
their warnings; and the decision whether a file is packed before it is written or later. Pure: no
clock, no disk, no network.

Packing costs many times more than writing. So a file is written unpacked if a rank waits or soon
will, that is, while a ring or the queue is more than half full. Space has priority: unpacked files
may never take more than a share of the space that is left below a limit, and near the limit every
file is packed at once.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rankdump._core import selection, statistics
from rankdump._core.element_types import ELEMENT_TYPES
from rankdump._core.plan import UNNAMED_MODEL, DumpPlan
from rankdump._core.record import StatisticRows, TensorKind, TensorSide
from rankdump._core.selection import ACCEPTED_VERDICT, SelectionVerdict
from rankdump._core.session_protocol import RecordHead
from rankdump._core.units import format_bytes

WARNING_RATIO = 0.8
"""Fraction of a limit above which a warning is given."""


@dataclass(frozen=True, slots=True)
class ResourcePolicy:
    """The limits of one agent; 0 means no limit."""

    max_record_bytes: int
    keep_free_bytes: int = 0
    keep_free_ratio: float = 0.0
    keep_free_inodes_ratio: float = 0.0
    disk_bytes: int = 0
    """Largest size of all dumps together."""
    job_bytes: int = 0
    """Largest size of the dump of one job."""
    retain_s: float = 0.0
    """Age in seconds above which iterations are removed."""
    retain_bytes: int = 0
    """Size of all dumps together above which iterations are removed."""

    @property
    def retains_all(self) -> bool:
        """Return whether iterations are never removed."""
        return not self.retain_s and not self.retain_bytes


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """Space of a disk; all zero when the disk was never read."""

    free_bytes: int = 0
    """Free bytes for processes without privileges."""
    total_bytes: int = 0
    free_inodes: int = 0
    total_inodes: int = 0
    """Number of inodes; 0 also for a file system without a fixed number of inodes."""


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """Input of the decision on one tensor."""

    policy: ResourcePolicy
    space: DiskSpace = field(default_factory=DiskSpace)
    queued_records: int = 0
    queued_bytes: int = 0
    """Bytes in flight, which will be on the disk before the next record."""
    used_bytes: int = 0
    """Size of all dumps of this agent."""
    job_bytes: int = 0
    """Size of the dump of the tensor's job."""


def compute_floor_bytes(policy: ResourcePolicy, space: DiskSpace) -> int:
    """Return the number of bytes that stay free on a disk: the larger one of both settings."""
    return max(policy.keep_free_bytes, int(policy.keep_free_ratio * space.total_bytes))


def compute_floor_inodes(policy: ResourcePolicy, space: DiskSpace) -> int:
    """Return the number of inodes that stay free on a disk."""
    return int(policy.keep_free_inodes_ratio * space.total_inodes)


def find_limit_reason(usage: ResourceUsage, byte_count: int) -> str:
    """Return why a tensor of this size is dropped; empty when there is space for it.

    While the space of a disk is unknown, no tensor is dropped for it: the write itself will fail.
    """
    if byte_count > usage.policy.max_record_bytes:
        return "record_too_large"
    return find_shortage(usage, byte_count)


def find_shortage(usage: ResourceUsage, byte_count: int) -> str:
    """Return why there is no space for `byte_count` more bytes; empty when there is."""
    policy, space, coming = usage.policy, usage.space, usage.queued_bytes + byte_count
    if space.total_bytes and space.free_bytes - coming < compute_floor_bytes(policy, space):
        return "disk_low"
    if space.total_inodes:
        left = space.free_inodes - usage.queued_records - 1
        if left < compute_floor_inodes(policy, space):
            return "inodes_low"
    if policy.disk_bytes and usage.used_bytes + coming > policy.disk_bytes:
        return "disk_cap"
    if policy.job_bytes and usage.job_bytes + coming > policy.job_bytes:
        return "job_quota"
    return ""


def find_retirement_cause(policy: ResourcePolicy, age_s: float, used_bytes: int) -> str:
    """Return why an iteration of this age is removed, `age` or `size`; empty when it stays.

    `used_bytes` counts only files that packing will not make smaller.
    """
    if policy.retain_s and age_s > policy.retain_s:
        return "age"
    return "size" if policy.retain_bytes and used_bytes > policy.retain_bytes else ""


def list_disk_warnings(policy: ResourcePolicy, root: str, space: DiskSpace) -> Iterator[str]:
    """Yield a warning for each minimum of free bytes or inodes that a disk is near or below."""
    free, total, floor = space.free_bytes, space.total_bytes, compute_floor_bytes(policy, space)
    # Without `keep_free_ratio` the minimum is a fixed size: how full the disk is does not matter
    # then.
    limit = total - floor if policy.keep_free_ratio else 0
    near = _is_near(total - free, limit) if limit else free * (1 - WARNING_RATIO) <= floor
    if total and near:
        now = f"{format_bytes(free)} ({free / total:.0%}) free of {format_bytes(total)}"
        key = _format_floor_key(policy, floor)
        yield f"disk of {root}: {now}; {_describe_floor(free, floor)} {format_bytes(floor)} ({key})"
    free, total, floor = space.free_inodes, space.total_inodes, compute_floor_inodes(policy, space)
    if floor and _is_near(total - free, total - floor):
        now = f"space for {free} more files of {total}"
        yield (
            f"disk of {root}: {now}; {_describe_floor(free, floor)} {floor} "
            "(agent.keep_free_inodes_ratio)"
        )


def list_cap_warnings(policy: ResourcePolicy, used_bytes: int) -> Iterator[str]:
    """Yield a warning when all dumps together are near their limit."""
    if policy.disk_bytes and _is_near(used_bytes, policy.disk_bytes):
        yield f"dumps take {_format_share(used_bytes, policy.disk_bytes)} (agent.disk_bytes)"


def list_job_warnings(policy: ResourcePolicy, job_id: str, job_bytes: int) -> Iterator[str]:
    """Yield a warning when the dump of a job is near its limit."""
    if policy.job_bytes and _is_near(job_bytes, policy.job_bytes):
        taken = _format_share(job_bytes, policy.job_bytes)
        yield f"the dump of job {job_id} takes {taken} (agent.job_bytes)"


def _is_near(used: int, limit: int) -> bool:
    return used >= WARNING_RATIO * limit


def _describe_floor(left: int, floor: int) -> str:
    return "tensors are dropped below" if left >= floor else "tensors are dropped while it is below"


def _format_floor_key(policy: ResourcePolicy, floor: int) -> str:
    if floor == policy.keep_free_bytes:
        return "agent.keep_free_bytes"
    return f"agent.keep_free_ratio is {policy.keep_free_ratio:.0%}"


def _format_share(used: int, limit: int) -> str:
    return f"{format_bytes(used)} of the {format_bytes(limit)} allowed"


MAX_REMEMBERED_BYTES = 4 << 20
"""Bytes of remembered reasons for one session: ten thousand operator names of the usual length."""
_ANSWER_BYTES = 192
"""Memory in bytes of a remembered reason besides its texts."""
_INPUT = TensorSide.INPUT


class RecordAdmission:
    """Decides which tensors of one rank are accepted, by the plan of the rank and the resource
    usage.

    The decision for an operator, a side and an element type is remembered, because they recur in
    every step. Not safe to use from several threads at once.
    """

    def __init__(self, plan: DumpPlan, device: int) -> None:
        self._plan = plan
        self._device_accepted = selection.decide_device(plan, device).accepted
        self._iteration: tuple[tuple[int, bool], str] = ((-1, False), "")
        self._roomy: tuple[ResourceUsage | None, int] = (None, 0)
        """The last usage that left space, and a size in bytes for which it did."""
        lists = plan.selection.operator_lists
        # Without either of these filters, the decision is the same for all slots of an operator and
        # for all models.
        self._by_tensor = bool(plan.selection.models) or any(each.has_exclusions for each in lists)
        self._reasons: dict[tuple[object, ...], str] = {}
        self._reasons_bytes = 0

    def check_record(self, head: RecordHead, usage: ResourceUsage) -> SelectionVerdict:
        """Decide on a record that contains its elements."""
        kind = head.kind
        reason = (
            self._find_iteration_reason(head.iteration, head.switched_on)
            or self._find_kind_reason(kind, kind.model, False)
            or self._find_limit_reason(usage, kind.byte_count)
        )
        return SelectionVerdict(False, reason) if reason else ACCEPTED_VERDICT

    def check_rows(self, rows: StatisticRows, usage: ResourceUsage) -> Mapping[str, Sequence[int]]:
        """Return the positions of rejected rows of statistics, by reason."""
        common = self._find_iteration_reason(rows.iteration, rows.switched_on)
        if common:
            return {common: range(len(rows))} if rows.kinds else {}
        low, net_name = find_limit_reason(usage, 0), self._plan.output.net_name
        refused: defaultdict[str, list[int]] = defaultdict(list)
        for place, kind in enumerate(rows.kinds):
            model = net_name or kind.model or UNNAMED_MODEL
            reason = self._find_kind_reason(kind, model, True) or low
            if reason:
                refused[reason].append(place)
        return refused

    def _find_limit_reason(self, usage: ResourceUsage, byte_count: int) -> str:
        # If there is space for a tensor, there is also space for a smaller one.
        roomy, roomy_bytes = self._roomy
        if usage is roomy and byte_count <= roomy_bytes:
            return ""
        reason = find_limit_reason(usage, byte_count)
        if not reason:
            self._roomy = usage, byte_count
        return reason

    def _find_iteration_reason(self, iteration: int, switched_on: bool) -> str:
        known, reason = self._iteration
        if known != (iteration, switched_on):
            reason = self._find_reason(iteration, switched_on)
            self._iteration = (iteration, switched_on), reason
        return reason

    def _find_reason(self, iteration: int, switched_on: bool) -> str:
        if not self._device_accepted:
            return "device_excluded"
        if not switched_on and not selection.decide_iteration(self._plan, iteration).accepted:
            return "iteration_excluded"
        return ""

    def _find_kind_reason(self, kind: TensorKind, model: str, is_statistics: bool) -> str:
        key = (kind.op_name, kind.side is _INPUT, kind.dtype, is_statistics)
        if self._by_tensor:
            key = (*key, model, kind.op_type, kind.slot)
        reason = self._reasons.get(key)
        if reason is None:
            reason = self._find_selection_reason(kind, model) or self._find_type_reason(
                kind.dtype, is_statistics
            )
            self._keep_reason(key, reason)
        return reason

    def _keep_reason(self, key: tuple[object, ...], reason: str) -> None:
        size = _ANSWER_BYTES + sum(sys.getsizeof(each) for each in key if isinstance(each, str))
        if self._reasons_bytes + size > MAX_REMEMBERED_BYTES:
            self._reasons.clear()
            self._reasons_bytes = 0
        self._reasons[key] = reason
        self._reasons_bytes += size

    def _find_selection_reason(self, kind: TensorKind, model: str) -> str:
        name, side, watched = kind.op_name, kind.side, self._plan.selection.watched
        if not selection.decide_side(self._plan, side).accepted:
            return "side_excluded"
        if watched is not None:
            taken = side is not _INPUT and selection.decide_watched_operator(watched, name).accepted
            return "" if taken else "operator_excluded"
        operators = self._plan.selection.get_operators(model)
        if not selection.decide_operator(operators, name).accepted:
            return "operator_excluded"
        verdict = selection.decide_exclusion(operators, kind.op_type, name, side, kind.slot)
        return "" if verdict.accepted else "tensor_excluded"

    def _find_type_reason(self, dtype: str, is_statistics: bool) -> str:
        if dtype not in ELEMENT_TYPES:
            return "unsupported_dtype"
        content = self._plan.content
        if is_statistics:
            known = not content.statistics or statistics.has_statistics(dtype)
            return "" if known else "no_statistics"
        return "no_statistics" if content.saved == "statistic" else ""


MAX_CALM_SHARE = 0.5
"""Share of a ring or of the queue above which ranks will soon have to wait."""
MAX_WAITING_SHARE = 0.25
"""Largest share that unpacked files may have of the space that is left; a fifth of the space before
they were written.
"""
MAX_RETAINED_SHARE = 0.125
"""Largest share of `retain_bytes` that unpacked files may take."""


class StorePressure(NamedTuple):
    """How near the ranks of an agent are to waiting for it."""

    ring_share: float = 0.0
    """Filled share of the fullest ring."""
    queue_share: float = 0.0
    """Filled share of the queue budget for frames in flight."""
    rank_waits: bool = False
    """Whether a frame waits for bytes of the queue budget."""


class PackDecision(NamedTuple):
    """Whether a file is packed later, and the reason in either case."""

    is_later: bool
    reason: str


def decide_packing(
    pressure: StorePressure, usage: ResourceUsage, *, waiting_bytes: int, byte_count: int
) -> PackDecision:
    """Decide whether a tensor's file is packed later, for a plan that allows it; `waiting_bytes` is
    the size of all files that are still to be packed.
    """
    cause = find_pressure_cause(pressure)
    if not cause:
        return PackDecision(False, "no_pressure")
    if is_space_short(usage, waiting_bytes + byte_count):
        return PackDecision(False, "little_space")
    return PackDecision(True, cause)


def find_pressure_cause(pressure: StorePressure) -> str:
    """Return why ranks wait or soon will; empty when they do not."""
    if pressure.rank_waits:
        return "rank_waits"
    if pressure.ring_share > MAX_CALM_SHARE:
        return "ring_half_full"
    return "queue_half_full" if pressure.queue_share > MAX_CALM_SHARE else ""


def is_space_short(usage: ResourceUsage, waiting_bytes: int) -> bool:
    """Return whether `waiting_bytes` of unpacked files are too many for the space that is left.

    These files already count as used space. A disk whose space is unknown counts as full.
    """
    policy = usage.policy
    if policy.retain_bytes and waiting_bytes > MAX_RETAINED_SHARE * policy.retain_bytes:
        return True
    return waiting_bytes > MAX_WAITING_SHARE * compute_bytes_left(usage)


def compute_bytes_left(usage: ResourceUsage) -> int:
    """Return the number of bytes that can be written before a limit drops a tensor."""
    policy, space = usage.policy, usage.space
    left = [space.free_bytes - compute_floor_bytes(policy, space)]
    if policy.disk_bytes:
        left.append(policy.disk_bytes - usage.used_bytes)
    if policy.job_bytes:
        left.append(policy.job_bytes - usage.job_bytes)
    return max(0, min(left) - usage.queued_bytes)
