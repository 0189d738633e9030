"""Commands beside a pyarrow that is installed and cannot be imported.

MindSpore needs a NumPy before 2, and pip installs the latest pyarrow beside it, which needs 2.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.tree_builder import TreeBuilder

from rankdump._analysis.table_index import index_tree
from rankdumpd.agent.table.table_process import TableProcess, TableRequest

CAUSE = "pyarrow requires NumPy 2.0 or newer, found 1.26.4"


@pytest.fixture
def unfit(tmp_path: Path) -> str:
    """A folder whose pyarrow cannot be imported."""
    folder = tmp_path / "modules"
    (folder / "pyarrow").mkdir(parents=True)
    (folder / "pyarrow" / "__init__.py").write_text(f"raise ImportError({CAUSE!r})\n")
    return str(folder)


@pytest.fixture
def indexed(tmp_path: Path) -> Path:
    tree = TreeBuilder(tmp_path / "tree")
    tree.tensor(0, 0, "Default/a-A/A-op0", np.ones(1, np.float32), tabled=True)
    tree.complete(0, 0, world_size=1)
    index_tree(tree.root)
    return tree.root


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("ls {}", 0, "1 tensor of 1 rank"),
        ("stats {}", 0, "all of them are finite"),
        ("status {}", 0, "closed"),
        ("diff {} {}", 0, "1 pair of tensors: 1 same"),
        ("fsck {}", 0, f"the table of statistics was not checked: {CAUSE}"),
        ("index {}", 2, f"rankdump[table] is installed, but cannot be imported: {CAUSE}"),
        ("query {} x", 2, f"rankdump[table] is installed, but cannot be imported: {CAUSE}"),
        ("web {}", 2, f"rankdump[web] is installed, but cannot be imported: {CAUSE}"),
    ],
)
def test_command_goes_on_without_it_or_says_why_not(indexed, unfit, command, code, said):
    words = command.replace("{}", str(indexed)).split()
    done = subprocess.run(
        [sys.executable, "-m", "rankdump", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": unfit},
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_writer_of_the_table_says_why_rows_wait(indexed, unfit, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", unfit)
    process = TableProcess(is_idle=False)
    try:
        answer = process.write(TableRequest(str(indexed), 0o440, 0o750, False, []))
    finally:
        process.close()
    assert answer.error == f"pyarrow cannot be imported: {CAUSE}"
