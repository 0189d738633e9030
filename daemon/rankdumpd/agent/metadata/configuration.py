"""A plan as the `data_dump.json` that would have said it. Pure: no clock, no disk, no network."""

from __future__ import annotations

import json

from rankdump.contract.layout.layouts import DEFAULT_LAYOUT
from rankdump.contract.plan import UNNAMED, DumpPlan, Selection

_DEBUG_MODES = {"always": 0, "overflow": 3, "exception": 4}


def configuration(plan: DumpPlan, device: int) -> bytes:
    """Return the file's bytes; a plan for every device names the one it was found on."""
    body = {
        "common_dump_settings": _common(plan, device),
        "e2e_dump_settings": _synchronous(plan),
    }
    return (json.dumps(body, indent=2) + "\n").encode()


def _common(plan: DumpPlan, device: int) -> dict[str, object]:
    selection, content = plan.selection, plan.content
    devices = (device,) if selection.devices is None else selection.devices
    common: dict[str, object] = {
        "dump_mode": _dump_mode(selection),
        "path": plan.output.root,
        "net_name": plan.output.net_name or UNNAMED,
        "iteration": selection.iterations.text,
        "saved_data": content.saved,
        "input_output": _sides(selection),
        "kernels": _kernels(selection),
        "support_device": list(devices),
        "op_debug_mode": _DEBUG_MODES[selection.trigger],
        "statistic_category": list(content.statistics),
        "file_format": plan.output.file_format,
        "initial_iteration": selection.initial_iteration,
    }
    if selection.trigger == "overflow":
        # With any other mode MindSpore refuses the key itself.
        common["overflow_number"] = selection.overflow_limit
    return common


def _synchronous(plan: DumpPlan) -> dict[str, object]:
    content = plan.content
    settings: dict[str, object] = {
        "enable": plan.output.layout == DEFAULT_LAYOUT.name,
        "trans_flag": True,
        "stat_calc_mode": "device" if content.on_device else "host",
        "device_stat_precision_mode": content.precision,
        "save_kernel_args": content.kernel_arguments,
        "sample_mode": int(content.sample_elements > 0),
    }
    if content.sample_elements:
        settings["sample_num"] = content.sample_elements
    return settings


def _dump_mode(selection: Selection) -> int:
    if selection.operators.marked:
        return 2
    return 0 if selection.operators.everything else 1


def _sides(selection: Selection) -> int:
    if selection.inputs and selection.outputs:
        return 0
    return 1 if selection.inputs else 2


def _kernels(selection: Selection) -> list[str]:
    operators = selection.operators
    patterns = (f"name-regex({pattern})" for pattern in operators.patterns)
    return [*operators.names, *operators.types, *patterns]
