"""Folders for a group, with any umask."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from rankdumpd.server.state_files import make_group_folder


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_make_group_folder_sets_mode_of_all_parents(tmp_path: Path, umask: int):
    before = os.umask(umask)
    try:
        make_group_folder(tmp_path / "run" / "worker-0", -1)
        make_group_folder(tmp_path / "run" / "worker-0", -1)
    finally:
        os.umask(before)
    for folder in (tmp_path / "run", tmp_path / "run" / "worker-0"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o750


def test_make_group_folder_leaves_existing_folder_unchanged(tmp_path: Path):
    (tmp_path / "run").mkdir(mode=0o755)
    make_group_folder(tmp_path / "run", -1)
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o755
