"""Files of the output folder: a hidden name first, then the real one at one blow."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

from rankdump.contract.errors import DamagedError
from rankdump.contract.layout.place import MAPPING_FILE
from rankdump.convert.request import Mapped

FAILED_FILE = "convert_failed_file_list.txt"
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def make_folder(root: Path, folder: Path) -> None:
    """Make a folder of the output, with those above; DamagedError when a link leads out of it."""
    if not folder.resolve().is_relative_to(root.resolve()):
        raise DamagedError(f"{folder}: a link leads out of {root}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def write(folder: Path, name: str, parts: Sequence[bytes | memoryview]) -> int:
    """Make or replace a file; return its bytes. What stands under its name is not followed."""
    hidden = folder / f".{uuid.uuid4().hex}.tmp"
    try:
        with os.fdopen(os.open(hidden, _CREATE, 0o666), "wb") as file:
            for part in parts:
                file.write(part)
        hidden.replace(folder / name)
    except BaseException:
        with contextlib.suppress(OSError):
            hidden.unlink()
        raise
    return sum(map(len, parts))


def add_mapped(mapped: Iterable[Mapped]) -> None:
    """Add the names that were too long to the `mapping.csv` of their folders, each once."""
    by_folder: dict[Path, list[Mapped]] = {}
    for each in mapped:
        by_folder.setdefault(each.folder, []).append(each)
    for folder, found in by_folder.items():
        path = folder / MAPPING_FILE
        before = path.read_bytes() if path.is_file() else b""
        rows = dict.fromkeys(before.splitlines(keepends=True))
        rows |= dict.fromkeys(_row(each) for each in found)
        write(folder, MAPPING_FILE, tuple(rows))


def list_failed(root: Path, failed: Sequence[Path]) -> None:
    """Leave the list of files that were not converted; without one, an old list goes."""
    if failed:
        lines = tuple(os.fsencode(path.absolute()) + b"\n" for path in failed)
        write(root, FAILED_FILE, lines)
    else:
        (root / FAILED_FILE).unlink(missing_ok=True)


def _row(mapped: Mapped) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow((mapped.name, mapped.full_name))
    return os.fsencode(text.getvalue())
