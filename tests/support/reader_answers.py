"""What commands print about a tree, to compare it with and without the table of the tree."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankdump import reader
from rankdump._analysis.reader import (
    indexed_manifests,
    tensor_statistics,
    tree_status,
    tree_usage,
)
from rankdump._analysis.table.table_files import TABLE_FOLDER
from rankdump._cli.command_group import run_command_line
from rankdump._core.forecast import DiskCapacity
from rankdump._core.status import AgentLoad

_DURATION = re.compile(r'"seconds": [0-9.]+|[0-9.]+ m?s\b')
COMMANDS = {
    "ls": ("ls",),
    "ls of a place": ("ls", "--rank", "0", "--iteration", "0", "--digest"),
    "ls without a match": ("ls", "--op", "nothing"),
    "stats": ("stats", "--limit", "20"),
    "stats of a place": ("stats", "--rank", "0", "--iteration", "1"),
    "stats of non-finite": ("stats", "--nonfinite"),
    "stats of a rank": ("stats", "--nonfinite", "--rank", "1"),
    "sorted stats": ("stats", "--sort", "l2norm", "--limit", "5"),
    "status": ("status",),
    "order": ("order",),
    "forecast": ("forecast",),
    "find-source": ("find-source", "forward"),
    "diff": ("diff", "--processes", "1", "--iteration-a", "0", "--iteration-b", "1"),
}


def use_small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have readers use the table of small trees too; the disk does not change between answers.

    Nor do the bytes of the table itself, which a forecast counts.
    """
    monkeypatch.setattr(indexed_manifests, "_MIN_MANIFESTS", 1)
    monkeypatch.setattr(tensor_statistics, "_MIN_PLACES", 1)
    monkeypatch.setattr(tree_status, "_disk_load", lambda root: AgentLoad())
    monkeypatch.setattr(tree_usage._UsageObserver, "add_index_files", lambda self: None)
    monkeypatch.setattr(reader, "disk_room", lambda root, ratio: DiskCapacity(1 << 40, 1 << 41))


def answer(root: Path) -> Iterator[tuple[str, object]]:
    """What each command prints, as text and as JSON, and its exit code."""
    for name, (command, *options) in COMMANDS.items():
        trees = [str(root)] * (2 if command == "diff" else 1)
        arguments = [command, *trees, *options]
        for form in ([], ["--json"]):
            out, problems = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(problems):
                code = run_command_line([*arguments, *form])
            printed = _DURATION.sub("", out.getvalue())
            yield f"{name} {form}", (code, printed, problems.getvalue())


def assert_same_answers(root: Path) -> None:
    indexed = dict(answer(root))
    table = root / TABLE_FOLDER
    table.rename(root.parent / "table")
    assert dict(answer(root)) == indexed
    (root.parent / "table").rename(table)
