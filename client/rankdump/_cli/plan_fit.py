"""Estimate from an earlier dump whether a plan fits on its disk, for `rankdump forecast` and
`rankdump run --require-fit`.
"""

from __future__ import annotations

from pathlib import Path

import click

from rankdump import reader
from rankdump._cli.text_format import format_count
from rankdump._core.forecast import (
    KEEP_FREE_RATIO,
    DumpForecast,
    count_planned_iterations,
    forecast_dump,
)
from rankdump._core.plan import DumpPlan
from rankdump._core.units import format_bytes, format_duration
from rankdump.errors import CorruptedError


def check_plan_fit(plan: DumpPlan, observed: Path | None) -> str:
    """Return the reason why a plan does not fit on the disk of its tree; empty when it fits.

    Estimates from the earlier dump in `observed`, by default in the tree of the plan; UsageError
    where there is none.
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
    room = reader.disk_room(root, KEEP_FREE_RATIO)
    found = forecast_dump(seen, count_planned_iterations(plan.selection.iterations), room)
    return "" if found.fits else f"the plan does not fit: {summarize_forecast(found)}"


def summarize_forecast(found: DumpForecast) -> str:
    """Return one sentence: the need, the usable space and the number of iterations that fit."""
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
