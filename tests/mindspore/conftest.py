"""Runs programs with MindSpore in separate processes, and reads their observations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

JOBS = Path(__file__).parent / "jobs"
TIMEOUT_S = 1800
"""For a test with all programs that it runs: ends one that hangs, and none on a busy machine."""

Job = Callable[..., str]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test here the time it takes to import and compile with MindSpore under load."""
    for item in items:
        item.add_marker(pytest.mark.timeout(TIMEOUT_S))


def run_job(
    name: str,
    *arguments: object,
    folder: Path,
    through: tuple[object, ...] = (),
    environ: Mapping[str, str] | None = None,
) -> str:
    """Run a program of `jobs/` to its end and return what it printed; there is no time limit.

    `through` stands before the program, such as `rankdump run --`; `environ` adds variables.
    MindSpore may abort when a process ends, after all of the program is done: a program says
    itself that it is, and how it ended does not count.
    """
    program = [*through, sys.executable, str(JOBS / name), *arguments]
    return run_to_its_end([str(word) for word in program], folder=folder, environ=environ)


def run_to_its_end(
    command: list[str], *, folder: Path, environ: Mapping[str, str] | None = None
) -> str:
    """Run a command that says `done`, and return what it printed."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**clean_environment(), **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert "done" in done.stdout.splitlines(), done.stdout[-4000:]
    return done.stdout


def clean_environment() -> dict[str, str]:
    """Return the environment without configurations; `python` is the one that runs the tests."""
    found = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith("RANKDUMP_") and name != "MINDSPORE_DUMP_CONFIG"
    }
    return found | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{found['PATH']}"}


class CaseResults:
    """Observations of the cases of one file."""

    def __init__(self, cases: Mapping[str, dict[str, Any]]) -> None:
        self._cases = cases

    def __call__(self, case: str) -> dict[str, Any]:
        """Return the observations of a case; a failed case raises with its error."""
        told = self._cases[case]
        assert "failed" not in told, told["failed"]
        return told


def run_cases(name: str, folder: Path) -> CaseResults:
    """Run all cases of a file."""
    out = folder / "told.json"
    run_job(name, out, folder=folder)
    return CaseResults(json.loads(out.read_text()))


@pytest.fixture(scope="session")
def apis(tmp_path_factory: pytest.TempPathFactory) -> CaseResults:
    return run_cases("cases_apis.py", tmp_path_factory.mktemp("apis"))


@pytest.fixture(scope="session")
def cells(tmp_path_factory: pytest.TempPathFactory) -> CaseResults:
    return run_cases("cases_cells.py", tmp_path_factory.mktemp("cells"))


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> CaseResults:
    return run_cases("cases_graph.py", tmp_path_factory.mktemp("graphs"))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    def run(name: str, *arguments: object, **how: Any) -> str:
        return run_job(name, *arguments, folder=tmp_path, **how)

    return run
