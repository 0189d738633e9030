"""Command `rankdump config`: shows the plan that a configuration file of any dialect describes."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path

import click

from rankdump._cli.output import print_json, print_lines
from rankdump._config import config_file
from rankdump._core.plan import (
    ContentSettings,
    DumpPlan,
    OperatorSelection,
    OutputSettings,
    TensorExclusion,
    TensorSelection,
    plan_to_json,
)
from rankdump._core.units import format_bytes, format_count, format_percentage
from rankdump._layout.profile import PROFILES
from rankdump._layout.statistic_tables import select_table_items


@click.group(no_args_is_help=False)
def config() -> None:
    """Check configuration files."""


@config.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
def check(file: Path, as_json: bool) -> int:
    """Print the plan that FILE describes, or name the key that is wrong.

    FILE is a data_dump.json of MindSpore or an acl.json of CANN. Environment variables that change
    a plan, such as RANKDUMP_OUTPUT, have the effect that they have in a job. Settings that are
    allowed but have a surprising effect are listed as warnings.
    """
    plan, _ = config_file.load_config_plan(file, os.environ)
    if as_json:
        print_json(json.loads(plan_to_json(plan)))
        return 0
    facts = describe_plan(plan)
    width = max(map(len, facts)) + 2
    print_lines(f"{name + ':':<{width}}{value}" for name, value in facts.items())
    fault = find_tree_fault(plan)
    # This is no error, because the job may run on a host where the tree can be written.
    notes = [*plan.warnings, *([f"on this host the {fault}"] if fault else [])]
    print_lines(f"warning: {text}" for text in notes)
    return 0


def find_tree_fault(plan: DumpPlan) -> str:
    """Return why the tree of a plan cannot be written on this host, as a clause; empty if nothing
    says so.

    Nothing is written, so the mount and the permissions of the nearest folder that exists decide.
    They do not tell what a network disk or one like /proc refuses only when it is asked, which
    `try_tree` does.
    """
    if not _has_tree(plan):
        return ""
    root = Path(plan.output.root)
    folder = root
    try:
        while not folder.exists():
            folder = folder.parent
        reason = _find_folder_fault(folder)
    except OSError as error:
        reason = error.strerror or str(error)
    return f"tree {root} cannot be written: {folder}: {reason}" if reason else ""


def try_tree(plan: DumpPlan) -> str:
    """Return why the tree of a plan cannot be written on this host, as a clause; empty if it can.

    A folder is made for a moment beside what there is of the tree, as the job is about to do.
    """
    fault = find_tree_fault(plan)
    if fault or not _has_tree(plan):
        return fault
    root = Path(plan.output.root)
    folder = next(each for each in (root, *root.parents) if each.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".rankdump-", dir=folder):
            return ""
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return ""  # a daemon waits until there is space
        return f"tree {root} cannot be written: {folder}: {error.strerror}"


def _has_tree(plan: DumpPlan) -> bool:
    return plan.enabled or plan.black_box.steps > 0


def _find_folder_fault(folder: Path) -> str:
    if not folder.is_dir():
        return os.strerror(errno.ENOTDIR)
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return os.strerror(errno.EROFS)
    # Checked for the effective user, because this user would write.
    own = os.access in os.supports_effective_ids
    may_write = os.access(folder, os.W_OK | os.X_OK, effective_ids=own)
    return "" if may_write else os.strerror(errno.EACCES)


def describe_plan(plan: DumpPlan) -> dict[str, str]:
    """Return the description of a plan: the text of each line by its name."""
    selection, output, delivery = plan.selection, plan.output, plan.delivery
    devices, full = selection.devices, delivery.on_full
    if full == "block":
        full += f", for {delivery.block_timeout_s:g} s without progress, then drop"
    sides = {"inputs": selection.inputs, "outputs": selection.outputs}
    return {
        "dialect": plan.dialect,
        **({} if plan.enabled else {"enabled": "no: nothing is dumped"}),
        "tree": f"{output.root} (layout {output.layout}, codec {output.codec})",
        "format": output.file_format,
        "profile": f"{output.profile} (as MindSpore {PROFILES[output.profile].version} writes)",
        "net name": output.net_name or "each model has its own",
        "iterations": _describe_iterations(selection),
        "devices": "all" if devices is None else ", ".join(map(str, devices)) or "none",
        **_describe_models(selection),
        "sides": " and ".join(side for side, is_wanted in sides.items() if is_wanted),
        "kept": _describe_trigger(selection),
        **({"optimizers": "their states after each step"} if selection.optimizer_states else {}),
        **_describe_content(plan.content, output),
        **({"fingerprints": "of each tensor"} if plan.content.fingerprints else {}),
        "buffer": f"{format_bytes(delivery.buffer_bytes)} a rank; when full: {full}",
        **_describe_overhead(plan),
        "durability": delivery.durability + (", strict" if delivery.strict else ""),
        "modes": f"files {output.file_mode:04o}, folders {output.folder_mode:04o}",
    }


def _describe_overhead(plan: DumpPlan) -> dict[str, str]:
    share = plan.delivery.max_step_overhead
    if not share:
        return {}
    return {"overhead": f"at most {format_percentage(share)} of a step, by keeping less"}


def _describe_iterations(selection: TensorSelection) -> str:
    first = selection.initial_iteration
    return selection.iterations.text + (f"; the first of the job is {first}" if first else "")


def _describe_models(selection: TensorSelection) -> dict[str, str]:
    watched = selection.watched
    if watched is not None:
        nodes, layers = ", ".join(watched.nodes), ", ".join(watched.layers)
        after = f"each of {layers}" if layers else "every other operator"
        return {"operators": f"{nodes}; their outputs, and again after {after}"}
    named = {f"of model {name}": _describe_operators(each) for name, each in selection.models}
    if named and selection.operators == OperatorSelection(everything=False):
        return named
    return {
        **named,
        "of other models" if named else "operators": _describe_operators(selection.operators),
    }


def _describe_operators(operators: OperatorSelection) -> str:
    if operators.marked:
        return "those that the script marks with rankdump.set_dump"
    parts = [
        *(f"type {kind}" for kind in operators.types),
        *operators.names,
        *(f"name-regex({pattern})" for pattern in operators.patterns),
        *(f"{first} to {last}" for first, last in operators.ranges),
    ]
    chosen = "all" if operators.everything else ", ".join(parts) or "none"
    left_out = [
        *(f"type {_describe_excluded(each)}" for each in operators.without_types),
        *(_describe_excluded(each) for each in operators.without_names),
    ]
    return f"{chosen}, without {', '.join(left_out)}" if left_out else chosen


def _describe_excluded(excluded: TensorExclusion) -> str:
    positions = " and ".join(excluded.positions)
    return f"{positions} of {excluded.name}" if positions else excluded.name


def _describe_trigger(selection: TensorSelection) -> str:
    if selection.trigger == "exception":
        return "inputs of the operator that raises"
    if selection.trigger == "always":
        return "every selected tensor"
    limit = selection.overflow_limit
    until = f"; a rank stops after {format_count(limit, 'such operator')}" if limit else ""
    return f"tensors of operators with an output that is not finite{until}"


def _describe_content(content: ContentSettings, output: OutputSettings) -> dict[str, str]:
    saved = {"tensor": "tensors", "statistic": "statistics", "full": "tensors and statistics"}
    facts = {"saved": saved[content.saved]}
    if content.has_tables:
        items = (
            ", ".join(select_table_items(content.statistics, PROFILES[output.profile]))
            or "no column"
        )
        where = f"device, {content.precision} precision" if content.on_device else "host"
        facts["statistics"] = f"{items} (computed on the {where})"
    largest = content.sample_elements
    facts["sampling"] = f"the first {format_count(largest, 'element')}" if largest else "off"
    facts["arguments"] = "written" if content.kernel_arguments else "not written"
    return facts
