"""Whether a record is taken, from its head alone. Pure: no clock, no disk, no network."""

from __future__ import annotations

from rankdump.contract import selection, statistics
from rankdump.contract.dtypes import ELEMENT_TYPES
from rankdump.contract.exchange import RecordHead
from rankdump.contract.plan import DumpPlan
from rankdump.contract.selection import YES, Verdict
from rankdump.contract.status import Load
from rankdumpd.agent.values import Policy


def verdict(head: RecordHead, plan: DumpPlan, device: int, load: Load, policy: Policy) -> Verdict:
    """Decide on one record; the reason is a word that is counted."""
    reason = (
        _plan_reason(head, plan, device)
        or _kind_reason(head, plan)
        or _room_reason(head, load, policy)
    )
    return Verdict(False, reason) if reason else YES


def _plan_reason(head: RecordHead, plan: DumpPlan, device: int) -> str:
    key = head.key
    if not selection.device_verdict(plan, device).accepted:
        return "device_excluded"
    if not head.switched_on and not selection.iteration_verdict(plan, key.iteration).accepted:
        return "iteration_excluded"
    if not selection.side_verdict(plan, key.side).accepted:
        return "side_excluded"
    if not selection.operator_verdict(plan.selection.operators, key.op_name).accepted:
        return "operator_excluded"
    return ""


def _kind_reason(head: RecordHead, plan: DumpPlan) -> str:
    if head.dtype not in ELEMENT_TYPES:
        return "unsupported_dtype"
    countable = head.figures is not None and statistics.countable(head.dtype)
    if (plan.content.saved == "statistic" or head.degraded) and not countable:
        return "no_statistics"
    return ""


def _room_reason(head: RecordHead, load: Load, policy: Policy) -> str:
    if head.data_bytes > policy.max_record_bytes:
        return "record_too_large"
    # What is queued will be on the disk before this record is.
    if load.disk_free_bytes - load.queued_bytes - head.data_bytes < policy.keep_free_bytes:
        return "disk_low"
    return ""
