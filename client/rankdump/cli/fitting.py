"""Whether a plan fits on its disk: what `rankdump forecast` says and `run --require-fit` asks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from rankdump import reader
from rankdump.cli.text import counted, duration, size
from rankdump.contract import dialect
from rankdump.contract.errors import DamagedError
from rankdump.contract.forecast import KEEP_FREE_RATIO, Forecast, forecast, planned
from rankdump.contract.plan import DumpPlan


def plan_of(config: Path, environ: Mapping[str, str]) -> DumpPlan:
    """Return what a configuration asks for; ConfigError says where it is wrong."""
    plan, _ = dialect.load(config, environ)
    return plan


def check_fit(plan: DumpPlan, observed: Path | None) -> str:
    """Return why a plan does not fit on the disk of its tree; empty when it does.

    By what a dump took before, in the tree of the plan unless another is named. A usage error
    where there is none: nothing is known then.
    """
    root = Path(plan.output.root)
    tree = root if observed is None else observed
    try:
        seen = reader.observe(tree)
    except DamagedError as error:
        raise click.UsageError(
            f"--require-fit: {error}; run once with iteration 0 in the configuration, and name "
            f"that tree with --observed"
        ) from None
    room = reader.disk_room(root, KEEP_FREE_RATIO)
    found = forecast(seen, planned(plan.selection.iterations), room)
    return "" if found.fits else f"the plan does not fit: {sentence(found)}"


def sentence(found: Forecast) -> str:
    """Return what is needed, what there is, and how many iterations fit, in one line."""
    needed = f"{size(found.disk_bytes)} in {counted(found.files, 'file')} are needed"
    if found.iterations is None:
        needed += " for each iteration"
    else:
        needed += f" for {counted(found.iterations, 'iteration')}"
    there = f"{size(found.usable_bytes)} may be taken of {size(found.total_bytes)}"
    kept = f"{found.keep_free_ratio:.0%} stay free"
    return f"{needed}, {there} ({kept}): {counted(found.fitting, 'iteration')} fit"


def lines(found: Forecast, *, ranks: int, seen: int) -> list[str]:
    """Return what a forecast says, one thing a line."""
    every = "one iteration" if found.iterations is None else counted(found.iterations, "iteration")
    stall = duration(found.stall_us)
    return [
        f"by {counted(seen, 'iteration')} of {counted(ranks, 'rank')} in the tree, "
        f"{every} will take:",
        f"  tensors     {found.tensors:,}",
        f"  files       {found.files:,}",
        f"  bytes in    {size(found.bytes_in)}",
        f"  on disk     {size(found.disk_bytes)}",
        f"  time        {duration(found.wall_us)}, of which a rank is held up for {stall}",
        sentence(found),
        *([] if found.fits else [f"it does not fit: {found.reason}"]),
    ]
