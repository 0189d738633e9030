"""Runs programs with MindSpore in processes of their own, and reads what they saw."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

JOBS = Path(__file__).parent / "jobs"
TIMEOUT_S = 100

Job = Callable[..., str]


def run_job(name: str, *arguments: object, folder: Path) -> str:
    """Run a program of `jobs/` to its end and return what it printed.

    MindSpore may abort when a process ends, after all of the program is done: a program says
    itself that it is, and how it ended does not count.
    """
    done = subprocess.run(
        [sys.executable, str(JOBS / name), *map(str, arguments)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert "done" in done.stdout.splitlines(), done.stdout[-4000:]
    return done.stdout


class Told:
    """What the cases of one file saw."""

    def __init__(self, cases: Mapping[str, dict[str, Any]]) -> None:
        self._cases = cases

    def __call__(self, case: str) -> dict[str, Any]:
        """Return what a case saw; one that failed is shown as it did."""
        told = self._cases[case]
        assert "failed" not in told, told["failed"]
        return told


def told_by(name: str, folder: Path) -> Told:
    """Run all cases of a file."""
    out = folder / "told.json"
    run_job(name, out, folder=folder)
    return Told(json.loads(out.read_text()))


@pytest.fixture(scope="session")
def apis(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return told_by("cases_apis.py", tmp_path_factory.mktemp("apis"))


@pytest.fixture(scope="session")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return told_by("cases_cells.py", tmp_path_factory.mktemp("cells"))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    def run(name: str, *arguments: object) -> str:
        return run_job(name, *arguments, folder=tmp_path)

    return run
