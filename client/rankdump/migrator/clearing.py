"""Takes away what an earlier dump of the same rank left, and nothing else.

Nothing is followed that is a link: a tree may stand in a folder that others write to.
"""

from __future__ import annotations

import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

_INFO = ("_info.pkl", "_info.csv")
_ENDINGS = (*_INFO, "_stack.json")
_LOOKED_AT = 1 << 20
"""Bytes of a manifest in which the first file of its dump is looked for."""


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
    for ending in _ENDINGS:
        _remove_file(folder / f"{name}{ending}")
    metadata = folder / ".dump_metadata"
    manifests = metadata / "manifest"
    if _is_folder(metadata) and _is_folder(manifests):
        alone = not any(True for ending in _INFO for _ in folder.glob(f"*_api_dump{ending}"))
        for manifest in manifests.glob("*.json"):
            if _is_of(manifest, f"{folder.name}/{name}/", alone=alone):
                _remove_file(manifest)


def _is_of(manifest: Path, prefix: str, *, alone: bool) -> bool:
    """Return whether a manifest is that of a dump whose files begin with a prefix.

    Of one without files nobody knows, unless no other dump is there.
    """
    if not _is_file(manifest):
        return False
    with manifest.open(encoding="utf-8", errors="replace") as file:
        found = re.search(r'"path": "([^"]+)"', file.read(_LOOKED_AT))
    return alone if found is None else found[1].startswith(prefix)


def _remove_tree(folder: Path) -> None:
    # rmtree itself refuses a link, and follows none below.
    if _is_folder(folder):
        shutil.rmtree(folder)


def _remove_file(path: Path) -> None:
    if _is_file(path):
        path.unlink()


def _is_file(path: Path) -> bool:
    return _is(stat.S_ISREG, path)


def _is_folder(path: Path) -> bool:
    return _is(stat.S_ISDIR, path)


def _is(kind: Callable[[int], bool], path: Path) -> bool:
    try:
        return kind(path.lstat().st_mode)
    except OSError:
        return False
