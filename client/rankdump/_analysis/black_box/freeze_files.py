"""Records of freezes in frozen trees, and the frozen trees beside a dump. The content of the files
is not trusted: for a damaged file, there is a one-line error.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from rankdump._analysis.reader.file_errors import named_errors, noted_errors
from rankdump._core.freeze_record import (
    BLACK_BOX_FOLDER,
    MAX_RECORD_BYTES,
    FreezeRecord,
    describe_cause,
    is_record_name,
    parse_freeze_record,
)
from rankdump._core.status import FreezeStatus
from rankdump._core.tree_root import READ_FLAGS, STATE_FOLDER
from rankdump.errors import CorruptedError


def find_frozen_tree(path: Path) -> Path:
    """Return the path itself if it is a frozen tree, else the latest frozen tree beside the dump;
    CorruptedError if there is none.
    """
    if _list_files(path):
        return path
    trees = list_frozen_trees(path)
    if not trees:
        raise CorruptedError(f"{path}: no frozen tree, nor a folder {BLACK_BOX_FOLDER} with one")
    return trees[-1]


def list_frozen_trees(root: Path) -> list[Path]:
    """Return the complete frozen trees beside a dump, the latest last."""
    dated: list[tuple[int, Path]] = []
    for folder in _list_folders(root / BLACK_BOX_FOLDER):
        files = _list_files(folder)
        if files:
            dated.append((max(file.lstat().st_mtime_ns for file in files), folder))
    return [folder for _, folder in sorted(dated)]


def read_freeze_records(tree: Path) -> tuple[FreezeRecord, ...]:
    """Return the records of all agents in a frozen tree; CorruptedError for a damaged one."""
    return tuple(map(_read_record, _list_files(tree)))


def list_freezes(root: Path, job_id: str = "") -> tuple[tuple[FreezeStatus, ...], list[str]]:
    """Return the freezes beside a dump, and a sentence for each damaged record."""
    found: list[FreezeStatus] = []
    problems: list[str] = []
    for tree in list_frozen_trees(root):
        with noted_errors(problems):
            first = min(read_freeze_records(tree), key=lambda each: each.frozen_us, default=None)
            if first is not None and job_id in ("", first.job_id):
                found.append(_make_status(first, tree))
    return tuple(sorted(found, key=lambda each: each.frozen_us)), problems


def _make_status(record: FreezeRecord, tree: Path) -> FreezeStatus:
    cause = record.causes[0]
    return FreezeStatus(
        record.job_id,
        record.iteration,
        cause.kind.value,
        describe_cause(cause),
        str(tree),
        record.frozen_us,
    )


def _read_record(path: Path) -> FreezeRecord:
    with named_errors(path):
        number = os.open(path, READ_FLAGS)
        with os.fdopen(number, "rb") as file:
            status = os.fstat(number)
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_RECORD_BYTES:
                raise CorruptedError("not a record of a freeze: no file, or too large")
            return parse_freeze_record(file.read())


def _list_files(tree: Path) -> list[Path]:
    try:
        return sorted(path for path in (tree / STATE_FOLDER).iterdir() if is_record_name(path.name))
    except OSError:
        return []


def _list_folders(above: Path) -> Iterator[Path]:
    try:
        with os.scandir(above) as items:
            yield from (Path(item.path) for item in items if item.is_dir(follow_symlinks=False))
    except OSError:
        return
