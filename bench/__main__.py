"""`python -m bench NAME [--json]`: run one benchmark, or `all`."""

from __future__ import annotations

import argparse
import importlib

NAMES = (
    "stall",
    "ingest",
    "small",
    "events",
    "idle",
    "stats",
    "dedup",
    "status",
    "agent",
    "merge",
    "convert",
    "kernels",
    "apidump",
    "diff",
    "reading",
    "governor",
    "table",
    "blackbox",
    "freeze",
    "web",
    "viewers",
    "device",
)
NEEDS_DEVICE = ("device",)
"""Benchmarks that `all` leaves out, because they need an accelerator."""
QUICK = ("diff", "reading", "governor", "table", "blackbox", "freeze", "web")
"""Benchmarks with a small version, for tests."""


def main() -> None:
    """Run the named benchmarks; print one object or one table for each."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("name", choices=(*NAMES, "all"))
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--quick", action="store_true", help="the small form, which shows nothing")
    parser.add_argument("--rows", type=int, help="rows of the tree of `table` or `web`")
    chosen = parser.parse_args()
    if chosen.quick and chosen.name not in QUICK:
        parser.error(f"--quick is for {', '.join(QUICK)}")
    if chosen.rows and chosen.name not in ("table", "web"):
        parser.error("--rows is for table and web")
    everything = tuple(name for name in NAMES if name not in NEEDS_DEVICE)
    for name in everything if chosen.name == "all" else (chosen.name,):
        # Imported one by one: a benchmark needs only its own peers.
        measure = importlib.import_module(f"bench.{name}").measure
        own = {"rows": chosen.rows} if chosen.rows else {}
        result = measure(quick=True, **own) if chosen.quick else measure(**own)
        print(result.to_json(name) if chosen.json else result.to_text(name), flush=True)


if __name__ == "__main__":
    main()
