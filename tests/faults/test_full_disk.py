"""Full disks of tree, inodes and state folder, and space that returns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from faults.agent_rig import EACH

ROOT = Path(__file__).parents[2]


def cramped(folder: Path, case: str) -> dict[str, Any]:
    """Play a case in a mount namespace of its own."""
    done = subprocess.run(
        ["unshare", "-rm", sys.executable, "-m", "faults.full_disks", str(folder), case],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}/tests:{ROOT}/client:{ROOT}/daemon"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_full_disk_affects_only_its_iteration(socket_folder: Path):
    """Law: counted by a reason of disks; its manifest comes when space returns, by itself."""
    told = cramped(socket_folder, "tree_full")
    assert told["kept"] == [EACH, 0, EACH]
    assert set(told["dropped"][1]) <= {"disk_full", "disk_low"}
    assert told["stored"] == 2 * EACH


def test_full_inode_table_affects_only_its_iteration(socket_folder: Path):
    told = cramped(socket_folder, "tree_without_inodes")
    assert told["kept"] == [EACH, 0, EACH]
    assert set(told["dropped"][1]) <= {"disk_full", "inodes_low"}
    assert told["stored"] == 2 * EACH


def test_full_state_folder_loses_nothing(socket_folder: Path):
    """Law: nothing is acknowledged until the ledger has space, and everything is then."""
    told = cramped(socket_folder, "state_full")
    assert told["kept"] == [EACH] * 3
    assert told["dropped"] == [{}, {}, {}]
    assert told["stored"] == 3 * EACH
