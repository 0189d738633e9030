"""Command `rankdump forecast`: estimates bytes, files, time and disk space that a plan will need;
`rankdump run --require-fit` uses it, too.
"""

from __future__ import annotations

import os
from pathlib import Path

import click

from rankdump import reader
from rankdump._cli.options import TREE_PATH
from rankdump._cli.output import print_json, print_lines
from rankdump._config import config_file
from rankdump._core.forecast import (
    KEEP_FREE_RATIO,
    DumpForecast,
    count_planned_iterations,
    forecast_dump,
)
from rankdump._core.json_values import make_plain
from rankdump._core.plan import DumpPlan
from rankdump._core.units import format_bytes, format_count, format_duration
from rankdump.errors import CorruptedError


def check_plan_fit(plan: DumpPlan, observed: Path | None) -> str:
    """Return why a plan does not fit on the disk of its tree, or nobody knows; empty when it fits.

    Estimates from the earlier dump in `observed`, by default in the tree of the plan; UsageError
    where there is none. Manifests that cannot be read are printed.
    """
    root = Path(plan.output.root)
    tree = root if observed is None else observed
    try:
        seen = reader.observe(tree)
    except CorruptedError as error:
        raise click.UsageError(
            f"--require-fit: {error}; run once with iteration 0 in the configuration, and name "
            f"that tree with --observed"
        ) from None
    print_lines(seen.problems, err=True)
    if seen.problems:
        return f"{tree}: the estimate lacks what cannot be read; name another tree with --observed"
    room = reader.disk_room(root, KEEP_FREE_RATIO)
    found = forecast_dump(seen, count_planned_iterations(plan.selection.iterations), room)
    return "" if found.fits else f"the plan does not fit: {summarize_forecast(found)}"


def summarize_forecast(found: DumpForecast) -> str:
    """Return one sentence about the need, the usable space and the number of iterations
    that fit.
    """
    needed = f"{format_bytes(found.disk_bytes)} in {format_count(found.files, 'file')} are needed"
    if found.iterations is None:
        needed += " for each iteration"
    else:
        needed += f" for {format_count(found.iterations, 'iteration')}"
    there = f"{format_bytes(found.usable_bytes)} of {format_bytes(found.total_bytes)} may be used"
    kept = f"{found.keep_free_ratio:.0%} stay free"
    return f"{needed}, {there} ({kept}): {format_count(found.fitting, 'iteration')} fit"


def format_forecast(found: DumpForecast, *, ranks: int, seen: int) -> list[str]:
    """Return the lines of a forecast."""
    every = (
        "one iteration" if found.iterations is None else format_count(found.iterations, "iteration")
    )
    stall = format_duration(found.stall_us)
    return [
        f"by {format_count(seen, 'iteration')} of {format_count(ranks, 'rank')} in the tree, "
        f"{every} will take:",
        f"  tensors     {found.tensors:,}",
        f"  files       {found.files:,}",
        f"  bytes in    {format_bytes(found.bytes_in)}",
        f"  on disk     {format_bytes(found.disk_bytes)}",
        f"  time        {format_duration(found.wall_us)}, of which a rank is blocked for {stall}",
        summarize_forecast(found),
        *([] if found.fits else [f"it does not fit: {found.reason}"]),
    ]


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
    help="Configuration that selects the iterations; without it, the need per iteration is shown.",
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
    *, tree: Path, config: Path | None, iterations: int | None, keep_free: float, as_json: bool
) -> int:
    """Estimate the disk space and the time that a dump needs.

    The estimate is based on the complete iterations of an earlier dump in TREE. Exit code 1 when
    the dump does not fit on the disk of the tree, or a manifest cannot be read.
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
        print_json(about | make_plain(found), indent=None)
    else:
        print_lines(format_forecast(found, ranks=observed.ranks, seen=observed.iterations))
    print_lines(observed.problems, err=True)
    return 0 if found.fits and not observed.problems else 1
