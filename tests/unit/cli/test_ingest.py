"""`rankdump ingest`: summary, exit codes and errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from support.native_tree import native_files, stored, write_file, write_tree

from rankdump._cli.command_group import run_command_line

IngestCommand: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def ingest(capfd: pytest.CaptureFixture[str]) -> IngestCommand:
    """The command in this process; the one that it starts writes its errors beside it."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        words = ["ingest", *map(str, arguments)]
        code = run_command_line(words)
        return subprocess.CompletedProcess(words, code, *capfd.readouterr())

    return run


def test_ingest_prints_a_summary_line(tmp_path: Path):
    """Files, bytes in, bytes stored, linked, skipped, failed; code 0."""
    files = write_tree(tmp_path / "source")
    command = [sys.executable, "-m", "rankdump", "ingest", tmp_path / "source"]
    command += ["--into", tmp_path / "tree", "--codec", "none"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
    assert f"{len(files)} files taken" in done.stdout
    assert "0 skipped, 0 failed" in done.stdout
    assert stored(tmp_path / "tree") == files


def test_ingest_prints_json(tmp_path: Path, ingest: IngestCommand):
    files = write_tree(tmp_path / "source", dict(native_files(ranks=1, iterations=1)))
    write_file(tmp_path / "source" / "bad.npy", b"x")
    done = ingest(tmp_path / "source", "--into", tmp_path / "tree", "--json")
    said = json.loads(done.stdout)
    assert done.returncode == 1
    assert (said["files"], said["failed"], said["complete"]) == (len(files), 1, True)
    assert done.stderr == "rankdump: left: bad.npy: not an npy file: it starts with b'x'\n"


@pytest.mark.parametrize(
    ("source", "into", "says"),
    [
        ("nothing", "tree", "No such file"),
        ("file", "tree", "Not a directory"),
        ("source", "source/tree", "does not contain it"),
        ("source", "", "does not contain it"),
        ("source", "file", "Not a directory"),
        ("source", "file/tree", "Not a directory"),
    ],
)
def test_ingest_rejects_bad_folders_in_one_line(
    tmp_path: Path, ingest: IngestCommand, source: str, into: str, says: str
):
    """Code 2, and nothing is made."""
    (tmp_path / "source").mkdir()
    (tmp_path / "file").write_text("x")
    done = ingest(tmp_path / source, "--into", tmp_path / into)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert says in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "source"]


def test_ingest_rejects_bad_options(tmp_path: Path, ingest: IngestCommand):
    assert ingest(tmp_path).returncode == 2
    assert ingest(tmp_path, "--into", tmp_path / "x", "--codec", "lzma").returncode == 2
    assert ingest(tmp_path, "--into", tmp_path / "x", "--until-idle", "-1").returncode == 2


def test_ingest_until_idle_stops(tmp_path: Path, ingest: IngestCommand):
    files = write_tree(tmp_path / "source", dict(native_files(ranks=1, iterations=1)))
    done = ingest(tmp_path / "source", "--into", tmp_path / "tree", "--until-idle", "0.1")
    assert done.returncode == 0, done.stderr
    assert stored(tmp_path / "tree") == files
