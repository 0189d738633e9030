"""`python -m bench NAME [--json]`: run one benchmark, or `all`."""

from __future__ import annotations

import argparse
import importlib

NAMES = (
    "stall",
    "ingest",
    "small",
    "idle",
    "stats",
    "dedup",
    "status",
    "agent",
    "merge",
    "convert",
    "apidump",
)


def main() -> None:
    """Run what was asked for, one object or one table for each benchmark."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("name", choices=(*NAMES, "all"))
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    chosen = parser.parse_args()
    for name in NAMES if chosen.name == "all" else (chosen.name,):
        # Imported one by one: a benchmark needs only its own peers.
        result = importlib.import_module(f"bench.{name}").measure()
        print(result.to_json(name) if chosen.json else result.to_text(name), flush=True)


if __name__ == "__main__":
    main()
