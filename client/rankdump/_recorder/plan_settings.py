"""Settings of the recorder that follow from a plan: layout, profile, sizes of buffers and batches,
statistics, shared memory, and how long a tensor may wait for space. Pure: no clock, no disk, no
network.
"""

from __future__ import annotations

from dataclasses import replace

from rankdump._core.job_control import PlanChange
from rankdump._core.plan import DumpPlan, OperatorSelection, TensorSelection
from rankdump._core.selection import decide_device
from rankdump._core.statistics import DEVICE_STATISTICS
from rankdump._core.tensor_fingerprint import FINGERPRINT_BYTES
from rankdump._layout.profile import DEFAULT_PROFILE, PROFILES, Profile
from rankdump._layout.statistic_tables import select_table_items
from rankdump._layout.tree_layouts import DEFAULT_LAYOUT, LAYOUTS, Layout, find_contradiction
from rankdump._recorder.overhead_governor import RecordForm
from rankdump._recorder.tensor_statistics import MAX_WAITING_ROWS, StatisticsCalculator
from rankdump._transport.send_buffer import WaitPolicy

SAMPLE_ELEMENTS = 1024
"""Number of elements that are kept of a tensor in the form `SAMPLE`."""
ROW_BYTES = 128
"""Approximate bytes of a row of statistics: its text and its share of the frame, without a
fingerprint.
"""


def find_change_fault(plan: DumpPlan, change: PlanChange, device: int) -> str:
    """Return why this change of a plan is impossible on a device; empty if it is possible."""
    device_verdict = decide_device(plan, device)
    if not device_verdict.accepted:
        return device_verdict.reason
    if change.operators is not None and plan.selection.watched is not None:
        return "the plan watches operators, which cannot be exchanged while the job runs"
    return find_contradiction(change.apply_to(plan))


def join_operators(selection: TensorSelection, more: OperatorSelection) -> OperatorSelection | str:
    """Return the operators that a plan selects together with more operators, or why they cannot be
    joined.

    If the plan selects no iteration, the result is the additional operators alone.
    """
    own = selection.operators
    if selection.iterations.spans == () or more.everything:
        return more
    if selection.models or own.marked:
        return "the plan selects operators by model, or those that the script marks"
    return own if own.everything else replace(own, names=(*own.names, *more.names))


def select_layout(plan: DumpPlan) -> Layout:
    """Return the plan's layout, or the default for an unknown one, which the agent rejects."""
    return LAYOUTS.get(plan.output.layout, DEFAULT_LAYOUT)


def has_call_stacks(plan: DumpPlan) -> bool:
    """Return whether the plan's tree has a file of call stacks."""
    return select_layout(plan).api_files is not None


def select_profile(plan: DumpPlan) -> Profile:
    """Return the plan's profile, or the default for an unknown one, which the agent rejects."""
    return PROFILES.get(plan.output.profile, DEFAULT_PROFILE)


def make_statistics_calculator(plan: DumpPlan) -> StatisticsCalculator | None:
    """Return the calculator of statistics on this rank; None if the plan needs none."""
    content = plan.content
    governed = is_governed(plan)
    if not (is_statistics_only(plan) or plan.delivery.on_full == "statistic" or governed):
        return None
    items = select_table_items(content.statistics, select_profile(plan))
    on_device = content.on_device and is_statistics_only(plan)
    # Statistics replace records in order to save time, so they must not copy whole tensors from a
    # device.
    on_device = on_device or (governed and set(items) <= {*DEVICE_STATISTICS})
    exact = select_layout(plan).api_files is not None
    return StatisticsCalculator(
        items=items,
        on_device=on_device,
        precision=content.precision,
        exact=exact,
        fingerprints=content.fingerprints,
    )


def is_statistics_only(plan: DumpPlan) -> bool:
    """Return whether the plan keeps statistics only."""
    return plan.content.saved == "statistic"


def is_governed(plan: DumpPlan) -> bool:
    """Return whether a plan limits the overhead; a plan with a trigger for failures does not."""
    return plan.delivery.max_step_overhead > 0 and plan.selection.trigger == "always"


def list_record_forms(plan: DumpPlan) -> tuple[RecordForm, ...]:
    """Return the forms in which tensors of a plan may be kept, the richest first.

    `SAMPLE` is left out for `bin` files and for tables beside the elements, which cannot say that
    elements are missing; `NOTHING` is left out for a strict plan, which may lose nothing.
    """
    forms = [RecordForm.FULL]
    if plan.content.saved == "tensor" and plan.output.file_format == "npy":
        forms.append(RecordForm.SAMPLE)
    if not is_statistics_only(plan):
        forms.append(RecordForm.STATISTICS)
    return (*forms, *([] if plan.delivery.strict else [RecordForm.NOTHING]))


def compute_batch_rows(plan: DumpPlan) -> int:
    """Return how many rows of statistics may wait before they are sent: half of the rows that the
    buffer holds.

    A smaller number of rows waits for the end of the iteration: rows are then computed and sent
    together, and no thread of rankdump runs in the middle of a step.
    """
    row_bytes = ROW_BYTES + FINGERPRINT_BYTES * plan.content.fingerprints
    return max(1, min(MAX_WAITING_ROWS, compute_row_buffer_bytes(plan) // (2 * row_bytes)))


def compute_row_buffer_bytes(plan: DumpPlan) -> int:
    """Return the budget in bytes of rows of statistics: if the plan keeps records too, a small
    share that records never use.
    """
    limit = plan.delivery.buffer_bytes
    return limit if is_statistics_only(plan) else limit // 16


def is_shared_memory_wanted(plan: DumpPlan, address: str) -> bool:
    """Return whether to request shared memory, which only an agent on this host can offer."""
    return plan.delivery.shared_memory and address.startswith("unix:")


def is_copied_directly(plan: DumpPlan) -> bool:
    """Return whether a tensor is read only when it is known to be kept, so that one
    copy is enough.
    """
    return plan.selection.trigger == "always"


def make_wait_policy(plan: DumpPlan) -> WaitPolicy:
    """Return how long a tensor may wait for space; only a plan that blocks allows any wait."""
    if plan.delivery.on_full != "block":
        return WaitPolicy()
    # If the buffer holds items that only the waiting thread itself could release, waiting would
    # never end.
    holds_back = not is_copied_directly(plan) or is_statistics_only(plan)
    return WaitPolicy(plan.delivery.block_timeout_s, only_behind_tensors=holds_back)
