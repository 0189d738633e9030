"""`rankdump config`: what a configuration file means, in whatever dialect it is written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from rankdump.cli.screen import say
from rankdump.cli.text import size
from rankdump.contract import dialect
from rankdump.contract.plan import DumpPlan, Operators


@click.group(no_args_is_help=False)
def config() -> None:
    """Look at configuration files."""


@config.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def check(file: Path, as_json: bool) -> int:
    """Print the plan that FILE makes, or the key at fault.

    The variables that change a plan, such as RANKDUMP_OUTPUT, count as they do in a job.
    """
    plan, _ = dialect.load(file, os.environ)
    if as_json:
        click.echo(json.dumps(json.loads(plan.to_json()), indent=1))
        return 0
    facts = described(plan)
    width = max(map(len, facts)) + 2
    say(f"{name + ':':<{width}}{value}" for name, value in facts.items())
    return 0


def described(plan: DumpPlan) -> dict[str, str]:
    """Return a plan in words, line by line."""
    selection, output, delivery = plan.selection, plan.output, plan.delivery
    devices = selection.devices
    sides = {"inputs": selection.inputs, "outputs": selection.outputs}
    full = delivery.on_full
    if full == "block":
        full += f", for {delivery.block_timeout_s:g} s without progress, then drop"
    return {
        "dialect": plan.dialect,
        "tree": f"{output.root} (layout {output.layout}, codec {output.codec})",
        "net name": output.net_name,
        "iterations": selection.iterations.text,
        "devices": "all" if devices is None else ", ".join(map(str, devices)) or "none",
        "operators": _operators(selection.operators),
        "sides": " and ".join(side for side, wanted in sides.items() if wanted),
        "buffer": f"{size(delivery.buffer_bytes)} a rank; when full: {full}",
        "durability": delivery.durability + (", strict" if delivery.strict else ""),
        "modes": f"files {output.file_mode:04o}, folders {output.folder_mode:04o}",
    }


def _operators(operators: Operators) -> str:
    if operators.everything:
        return "all"
    parts = [
        *(f"type {kind}" for kind in operators.types),
        *operators.names,
        *(f"name-regex({pattern})" for pattern in operators.patterns),
    ]
    return ", ".join(parts) or "none"
