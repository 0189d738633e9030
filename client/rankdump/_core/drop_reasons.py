"""Reasons why a selected tensor is not in the tree, or less of it than the plan selects: the closed
list, with cause and remedy of each reason in the words that commands, logs and docs/guarantees.md
share. Pure.

Balances, rows of the ledger and metrics count by the listed reasons; any other reason counts as
OTHER_REASON.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rankdump._core.units import format_count


class DropExplanation(NamedTuple):
    """Why tensors were dropped, and what prevents it; both texts continue a sentence."""

    cause: str
    remedy: str


OTHER_REASON = "other"
BUFFER_FULL = "buffer_full"
STEP_OVERHEAD = "step_overhead"
DEGRADE_REASONS = (BUFFER_FULL, STEP_OVERHEAD)
"""Reasons for which less of a tensor is kept than the plan selects."""

_NO_LOSS = "no loss: select it in the plan to dump it"
_PLAIN_COPY = "dump a plain tensor made from it with session.dump"
_FASTER_DISK = "dump fewer tensors, statistics only, or to a faster disk"
_FREE_SPACE = "free space, or dump to another disk"
_REPORT = "report it with the rank's log"

_PLAN_TEXTS = {
    "device_excluded": ("the plan does not select this device", _NO_LOSS),
    "iteration_excluded": ("the plan does not select this iteration", _NO_LOSS),
    "operator_excluded": ("the plan does not select this operator", _NO_LOSS),
    "side_excluded": ("the plan does not select this side of the operator", _NO_LOSS),
    "tensor_excluded": ("the plan leaves out this tensor of the operator", _NO_LOSS),
}

# Reasons in the tensor: it cannot be dumped, or not in the form that the plan selects.
_TENSOR_TEXTS = {
    "changed_in_place": (
        "the tensor was overwritten in place before its elements were copied",
        "use a plan without a trigger for this operator, which copies at once",
    ),
    "storage_freed": (
        "the memory of the tensor was freed before its elements were copied",
        "dump it where it is still in use, such as inside the module that owns it",
    ),
    "graph_capture": (
        "a CUDA graph was being captured, and a copy would have ended the capture",
        "run the dumped iterations without CUDA graphs",
    ),
    "no_data": (
        "the tensor has no elements yet: a meta tensor or a lazy parameter",
        "begin the dump after the first forward",
    ),
    "not_waited": (
        "no Work.wait or wait_tensor showed when the result of the collective could be read",
        "wait for the work itself, not for its future, or call the collective without async_op",
    ),
    "operator_failed": (
        "the operator failed, so its result cannot be read",
        "correct the error that the operator raised",
    ),
    "unreadable_array": ("numpy cannot view the object as an array", "pass an array or tensor"),
    "unsupported_dtype": (
        "no file can hold elements of this type",
        "dump a copy in another type with session.dump",
    ),
    "unsupported_nested": ("no file can hold a nested tensor", _PLAIN_COPY),
    "unsupported_quantized": ("no file can hold a quantized tensor", _PLAIN_COPY),
    "unsupported_sparse": ("no file can hold a sparse tensor", _PLAIN_COPY),
    "unsupported_tensor_class": (
        "the tensor is of a class without plain elements of its own, such as a jagged one",
        _PLAIN_COPY,
    ),
    "figures_failed": (
        "its statistics could not be computed",
        "set saved_data to tensor, and report it with the rank's log",
    ),
    "no_statistics": (
        "there are no statistics of this element type",
        "set saved_data to tensor or full",
    ),
    "record_too_large": (
        "the tensor is larger than agent.max_record_bytes",
        "raise that setting of the agent",
    ),
    "slot_too_high": (
        "a bin file cannot number so many tensors of one operator",
        "use a layout with npy files",
    ),
}

_SPACE_TEXTS = {
    BUFFER_FULL: (
        "the rank's send buffer stayed full, because the agent writes more slowly than the "
        "rank dumps",
        "raise block_timeout_s or buffer_bytes, or " + _FASTER_DISK,
    ),
    STEP_OVERHEAD: (
        "dumping would have taken more of the step than rankdump.max_step_overhead allows, or "
        "than rankdump.blackbox.max_overhead does in a black box",
        "raise that setting, or dump fewer tensors or statistics only",
    ),
    "no_memory": ("the agent had no memory left for it", "raise agent.memory_bytes"),
    "no_descriptors": (
        "the agent had no file descriptors left",
        "raise LimitNOFILE of its unit, or ulimit -n",
    ),
    "disk_low": ("free space on the disk is below agent.keep_free_bytes or its ratio", _FREE_SPACE),
    "inodes_low": (
        "free inodes on the disk are below agent.keep_free_inodes_ratio",
        "remove small files, or dump to another disk",
    ),
    "disk_cap": ("all dumps of the agent reached agent.disk_bytes", "raise it or remove dumps"),
    "job_quota": ("the job reached agent.job_bytes on this host", "raise it or dump less"),
    "disk_full": (
        "the disk had no space or no inodes left when the file was written",
        "free space, remove small files, or dump to another disk",
    ),
}

# Reasons that are errors on the tensor's way into the tree.
_FAULT_TEXTS = {
    "write_error": ("the file could not be written", "the agent's log has the error of the disk"),
    "name_taken": (
        "a file of that name, with other content, is in the tree",
        "dump to an empty folder",
    ),
    "outside_root": (
        "a folder of the tree is a link that leads out of it",
        "replace the link by a folder",
    ),
    "corrupted": (
        "its data did not match its checksum on arrival",
        "test the memory of the host; the job's own data may be damaged as well",
    ),
    "unreadable": ("its frame could not be decoded", "use one version of rank and agent"),
    "torn": (
        "the rank died before its elements were complete",
        "see the error that ended the rank",
    ),
    "copy_failed": ("copying it out of the device or its memory failed", _REPORT),
    "not_taken_by_agent": (
        "no agent took it before the rank ended",
        "start an agent, or use rankdump run",
    ),
    "rejected_by_agent": (
        "the agent rejected the rank while its job ran",
        "remove the cause that the rank's log line names, and start the job again",
    ),
    "internal_error": ("an unexpected error of rankdump", _REPORT),
}

PLAN_REASONS = frozenset(_PLAN_TEXTS)
"""Reasons that mean that the plan does not select the tensor, as the agent found."""
SPACE_REASONS = frozenset(_SPACE_TEXTS)
"""Reasons that mean that there was no space or time for the tensor: in memory, on the disk, or
within a limit.
"""
DROP_EXPLANATIONS: Mapping[str, DropExplanation] = {
    reason: DropExplanation(*texts)
    for reason, texts in {
        **_PLAN_TEXTS,
        **_TENSOR_TEXTS,
        **_SPACE_TEXTS,
        **_FAULT_TEXTS,
        OTHER_REASON: ("a reason that this version does not know", "use one version everywhere"),
    }.items()
}
"""Cause and remedy of each listed reason."""
DROP_REASONS = frozenset(DROP_EXPLANATIONS)


def normalize_reason(reason: str) -> str:
    """Return the reason under which a drop is counted: the given one if it is listed, else
    OTHER_REASON.
    """
    return reason if reason in DROP_REASONS else OTHER_REASON


def normalize_degrade_reason(reason: str) -> str:
    """Return the reason under which a degraded tensor is counted; older ranks do not give one."""
    return reason if reason in DEGRADE_REASONS else BUFFER_FULL


def explain_drop(reason: str) -> DropExplanation:
    """Return cause and remedy of a reason; a reason that is not listed counts as `other`."""
    return DROP_EXPLANATIONS[normalize_reason(reason)]


def describe_drops(dropped: Mapping[str, int]) -> list[str]:
    """Return one sentence for each drop reason, the most frequent first.

    >>> describe_drops({"disk_cap": 2})[0].partition(";")[0]
    '2 tensors dropped (disk_cap): all dumps of the agent reached agent.disk_bytes'
    """
    return _describe_reasons(dropped, "dropped")


def describe_degraded(degraded_by: Mapping[str, int]) -> list[str]:
    """Return one sentence for each degrade reason, the most frequent first.

    >>> describe_degraded({"buffer_full": 1})[0].partition(";")[0]
    '1 tensor degraded (buffer_full): less than the plan selects was kept'
    """
    return _describe_reasons(degraded_by, "degraded", "less than the plan selects was kept; ")


def _describe_reasons(counts: Mapping[str, int], verb: str, effect: str = "") -> list[str]:
    return [
        f"{format_count(count, 'tensor')} {verb} ({reason}): {effect}"
        f"{'; '.join(explain_drop(reason))}"
        for reason, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        if count
    ]


def count_lost(dropped: Mapping[str, int]) -> int:
    """Return how many tensors were lost; a tensor that the plan does not select is no loss."""
    return sum(count for reason, count in dropped.items() if reason not in PLAN_REASONS)
