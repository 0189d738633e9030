"""A root to everything that stands in its folders, hidden names as well; follows no link."""

from __future__ import annotations

import os
import stat
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from rankdump.contract.errors import DamagedError
from rankdump.contract.layout.folders import RANK_FOLDER, ROOT, Folder, Names, inside
from rankdump.contract.layout.long_names import LongNames
from rankdump.contract.layout.mindspore_sync import GRAPH_FOLDER, METADATA_FOLDER, ORDER_FOLDER
from rankdump.contract.layout.place import MAPPING_FILE
from rankdump.contract.layout.reading import absent_in
from rankdump.contract.order import ORDER_FOLDER as GLOBAL_ORDER_FOLDER
from rankdump.fsck.values import Damage, Kind, Seen
from rankdump.reader.names import long_names

_BESIDE = (METADATA_FOLDER, ORDER_FOLDER, GRAPH_FOLDER)
"""What stands in the folder of a rank beside its tensors."""


def scan(root: Path) -> list[Seen]:
    """Return what stands in the folders of a tree, in the order of their names.

    Of the root itself only what may belong to a dump: it may hold anything. DamagedError when a
    folder cannot be read.
    """
    return list(_folder(root, "", ROOT))


def unfiled(root: Path, everything: Sequence[Seen]) -> Iterator[Damage]:
    """Yield what tables of long names name and is not there.

    For trees without manifests, which say it better: a dropped tensor has its row as well.
    """
    folders: defaultdict[str, set[str]] = defaultdict(set)
    for seen in everything:
        folders[seen.where].add(seen.name)
    for seen in everything:
        folder = seen.folder if seen.name == MAPPING_FILE and seen.regular else None
        if folder is not None and folder.names is not Names.NONE:
            names = long_names(root / seen.path)
            for name in absent_in(folder, names, folders[seen.where]):
                text = f"{seen.path} names it, and it is not there"
                yield Damage(Kind.MISSING, f"{seen.where}/{name}", text)


def read(root: Path, path: str) -> memoryview:
    """Return the bytes of a regular file; DamagedError when it is none, or cannot be read."""
    try:
        opened = os.open(root / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(opened).st_mode):
                raise DamagedError("no regular file")
            with os.fdopen(opened, "rb", buffering=0, closefd=False) as file:
                return memoryview(file.readall())
        finally:
            os.close(opened)
    except OSError as error:
        raise DamagedError(f"cannot be read: {error.strerror}") from None


def _folder(root: Path, where: str, folder: Folder | None) -> Iterator[Seen]:
    try:
        with os.scandir(root / where) as found:
            listed = sorted(found, key=lambda each: each.name)
    except OSError as error:
        raise DamagedError(f"{root / where}: cannot be read: {error.strerror}") from None
    names = _long_names(root, where, folder, listed)
    for item in listed:
        path = f"{where}/{item.name}" if where else item.name
        known, below = _below(where, folder, item.name)
        if not where and not known:
            continue
        if known and item.is_dir(follow_symlinks=False):
            yield from _folder(root, path, below)
            continue
        seen = _seen(path, item, folder, names)
        if seen is not None:
            yield seen


def _below(where: str, folder: Folder | None, name: str) -> tuple[bool, Folder | None]:
    """Return whether a folder of that name belongs to a tree, and what dumped files it holds."""
    if not where and name == GLOBAL_ORDER_FOLDER:
        return True, None
    if folder is None:  # what stands beside the tensors may have folders of any name
        return not name.startswith("."), None
    if RANK_FOLDER.fullmatch(where) and name in _BESIDE:
        return True, None
    below = inside(folder, name)
    return below is not None, below


def _seen(
    path: str, item: os.DirEntry[str], folder: Folder | None, names: LongNames
) -> Seen | None:
    try:
        facts = item.stat(follow_symlinks=False)
    except FileNotFoundError:  # gone since it was listed
        return None
    return Seen(
        path=path,
        regular=stat.S_ISREG(facts.st_mode),
        link=stat.S_ISLNK(facts.st_mode),
        size_bytes=facts.st_size,
        modified_ns=facts.st_mtime_ns,
        inode=(facts.st_dev, facts.st_ino),
        folder=folder,
        full=names.full(item.name),
    )


def _long_names(
    root: Path, where: str, folder: Folder | None, listed: list[os.DirEntry[str]]
) -> LongNames:
    held = folder is not None and folder.names is not Names.NONE
    mapping = next((item for item in listed if item.name == MAPPING_FILE), None)
    if not held or mapping is None or not mapping.is_file(follow_symlinks=False):
        return LongNames()
    return long_names(root / where / MAPPING_FILE)
