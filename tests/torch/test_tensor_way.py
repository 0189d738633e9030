"""The way of one tensor, traced and compared with docs/architecture.md."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
SECTION = (
    (ROOT / "docs" / "architecture.md")
    .read_text()
    .split("\n## The way of one tensor\n")[1]
    .split("\nOther cases:")[0]
)
ROWS = [
    [cell.strip(" `") for cell in line[1:-1].split("|")][1:]
    for line in SECTION.splitlines()
    if line.startswith("|")
][2:]
THREADS = {
    "training": r"MainThread",
    "sender": r"Thread-\d+.*",
    "connection": r"rankdump-.*",
    "reader": r"rankdumpd-reader.*",
    "worker": r"rankdumpd-worker.*",
    "committer": r"rankdumpd-committer.*",
    "rpc": r"rankdumpd-rpc.*",
}
OWN = ("training", "sender", "connection", "reader", "worker", "committer")
"""Threads of one session; other calls of the server share the rpc threads."""


def path_of(name: str) -> str:
    """Return a module's path, from its name on the page."""
    return f"client/rankdump/{name}" if name.startswith("_") else f"daemon/rankdumpd/{name}"


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, str, str]]:
    """Thread, file and function of every call while a tensor was on its way."""
    script = Path(__file__).with_name("traced_way.py")
    folder = tmp_path_factory.mktemp("way")
    done = subprocess.run(
        [sys.executable, script, folder], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    return {tuple(call) for call in json.loads(done.stdout.splitlines()[-1])}


def test_tensor_passes_every_function_of_the_table(calls: set[tuple[str, str, str]]):
    """Each runs in the thread of the table; for a class without a method any function counts."""
    for file, function, _, thread in ROWS:
        names = {
            name
            for at, path, name in calls
            if path == path_of(file) and re.fullmatch(THREADS[thread], at)
        }
        assert names, (file, thread)
        if "." in function or function[0].islower():
            assert function.rpartition(".")[2] in names, (file, function, thread)


def test_tensor_passes_no_file_that_the_page_leaves_out(calls: set[tuple[str, str, str]]):
    beside = SECTION.split("\nThe same call also runs code")[1]
    known = {path_of(row[0]) for row in ROWS} | set(
        map(path_of, re.findall(r"`([\w/]+\.py)`", beside))
    )
    threads = "|".join(THREADS[name] for name in OWN)
    entered = {path for at, path, _ in calls if re.fullmatch(threads, at)}
    assert entered <= known, sorted(entered - known)
