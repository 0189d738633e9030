"""Takes away what an earlier dump of the same rank left, and nothing else.

Nothing is followed that is a link: a tree may stand in a folder that others write to.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

_INFO = ("_info.pkl", "_info.csv", "_stack.json")
_MANIFESTS = (".dump_metadata", "manifest")


def rank_folder(root: str, rank: int) -> Path:
    """Return the folder of a rank."""
    return Path(root) / f"rank{rank}"


def make_rank_folder(root: str, rank: int) -> Path:
    """Return the folder of a rank, made for its owner alone when it was not there."""
    Path(root).mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = rank_folder(root, rank)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def clear(root: str, rank: int, framework: str) -> None:
    """Remove tensors, info, stacks and manifests of a framework's dump; OSError says what stays."""
    folder = rank_folder(root, rank)
    if not _is_folder(folder):
        return
    name = f"{framework}_api_dump"
    _remove_tree(folder / name)
    for ending in _INFO:
        _remove_file(folder / f"{name}{ending}")
    metadata = folder / _MANIFESTS[0]
    if _is_folder(metadata):
        _remove_tree(metadata / _MANIFESTS[1])


def _remove_tree(folder: Path) -> None:
    # rmtree itself refuses a link, and follows none below.
    if _is_folder(folder):
        shutil.rmtree(folder)


def _remove_file(path: Path) -> None:
    try:
        regular = stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if regular:
        path.unlink()


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False
