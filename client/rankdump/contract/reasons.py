"""Why a tensor that the plan selected is not in the tree: every word there is for it. Pure.

Balances, rows of the ledger and metrics count by these; a word from elsewhere counts as OTHER.
"""

from __future__ import annotations

OTHER = "other"

BY_PLAN = frozenset(
    {
        "device_excluded",
        "iteration_excluded",
        "operator_excluded",
        "side_excluded",
        "tensor_excluded",
    }
)
"""The agent found that the plan does not select it after all."""

BY_KIND = frozenset(
    {
        "changed_in_place",
        "figures_failed",
        "graph_capture",
        "no_data",
        "no_statistics",
        "operator_failed",
        "record_too_large",
        "slot_too_high",
        "storage_freed",
        "unreadable_array",
        "unsupported_dtype",
        "unsupported_nested",
        "unsupported_quantized",
        "unsupported_sparse",
        "unsupported_tensor_class",
    }
)
"""It is of a kind that cannot be dumped so."""

BY_ROOM = frozenset(
    {
        "buffer_full",
        "disk_cap",
        "disk_full",
        "disk_low",
        "inodes_low",
        "job_quota",
        "no_descriptors",
        "no_memory",
    }
)
"""There was no room for it: in memory, on the disk, or by a limit."""

BY_FAULT = frozenset(
    {
        "copy_failed",
        "corrupted",
        "internal_error",
        "name_taken",
        "not_taken_by_agent",
        "outside_root",
        "torn",
        "unreadable",
        "write_error",
    }
)
"""Something went wrong on its way."""

REASONS = BY_PLAN | BY_KIND | BY_ROOM | BY_FAULT | {OTHER}


def known(reason: str) -> str:
    """Return a reason as it is counted."""
    return reason if reason in REASONS else OTHER
