"""Short soak: every kind of fault, on one agent with its coordinator and three ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("seed", [1, 2])
def test_short_soak_breaks_no_law(seed: int, tmp_path: Path):
    """Law: whatever fails, no acknowledged record is lost, duplicated or wrong."""
    words = ["-m", "faults", "--small", "--quiet", "--json", "--pause", "0.3"]
    words += ["--seconds", "6", "--faults", "21"]
    done = subprocess.run(
        [sys.executable, *words, "--seed", str(seed), "--keep", str(tmp_path / "kept")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}/tests:{ROOT}/client:{ROOT}/daemon"},
    )
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)
    assert sum(verdict["happened"].values()) >= 8, verdict
    assert verdict["figures"]["acknowledged"] > 100
