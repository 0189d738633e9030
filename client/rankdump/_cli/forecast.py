"""Command `rankdump forecast`: bytes, files, time and disk space that a plan will need."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import click

from rankdump import reader
from rankdump._cli import plan_fit
from rankdump._cli.options import TREE_PATH
from rankdump._cli.output import print_lines
from rankdump._config import config_file
from rankdump._core.forecast import KEEP_FREE_RATIO, count_planned_iterations, forecast_dump


def _parse_share(context: click.Context, parameter: click.Parameter, text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if 0 <= share < 1:
        return share
    allowed = "a fraction of the disk, such as 10% or 0.1"
    raise click.BadParameter(f"{text!r} is not allowed; allowed: {allowed}", context, parameter)


@click.command()
@click.argument("tree", type=TREE_PATH)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="Configuration that selects the iterations; default: the need of each iteration.",
)
@click.option(
    "--iterations", type=click.IntRange(min=0), help="Number of iterations, in place of --config."
)
@click.option(
    "--keep-free",
    metavar="SHARE",
    default=f"{KEEP_FREE_RATIO:.0%}",
    callback=_parse_share,
    show_default=True,
    help="Fraction of the disk to keep free, as the agents do.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
def forecast(
    *,
    tree: Path,
    config: Path | None,
    iterations: int | None,
    keep_free: float,
    as_json: bool,
) -> int:
    """Estimate the disk space and the time that a dump needs.

    The estimate is based on the complete iterations of an earlier dump in TREE. Exit code 1 when
    the dump does not fit on the disk of the tree.
    """
    if config is not None and iterations is not None:
        raise click.UsageError("--config and --iterations cannot be combined")
    root = tree
    if config is not None:
        plan, _ = config_file.load_config_plan(config, os.environ)
        iterations, root = (
            count_planned_iterations(plan.selection.iterations),
            Path(plan.output.root),
        )
    observed = reader.observe(tree)
    found = forecast_dump(observed, iterations, reader.disk_room(root, keep_free))
    if as_json:
        about = {"tree": str(tree), "observed": observed.iterations, "ranks": observed.ranks}
        click.echo(json.dumps({**about, **asdict(found)}))
    else:
        print_lines(plan_fit.format_forecast(found, ranks=observed.ranks, seen=observed.iterations))
    return 0 if found.fits else 1
