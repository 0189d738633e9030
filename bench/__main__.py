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
    "diff",
