"""Files of the output folder: a hidden name first, then the real one at one blow."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
import uuid
from collections.abc import Sequence
from pathlib import Path

from rankdump.contract.errors import DamagedError
from rankdump.contract.layout.place import MAPPING_FILE
from rankdump.convert.request import Mapped, Summary

FAILED_FILE = "convert_failed_file_list.txt"
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def one_line(name: str) -> str:
    """Return a name with escapes in the place of what would end or redraw its line."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), name)


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


def record(root: Path, summary: Summary, *, listing: bool) -> None:
    """Leave beside the outputs which names were too long, and if wanted what was not converted."""
    _add_mapped(summary)
    if listing:
        _list_failed(root, summary.failed)


def _add_mapped(summary: Summary) -> None:
    """Add names to the `mapping.csv` of their folders, each once however often it is converted."""
    rows: dict[Path, dict[bytes, None]] = {}
    for outcome in summary.outcomes:
        for mapped in outcome.mapped:
            rows.setdefault(mapped.folder, {})[_row(mapped)] = None
    for folder, found in rows.items():
        path = folder / MAPPING_FILE
        before = path.read_bytes() if path.is_file() else b""
        new = tuple(row for row in found if row not in before)
        if new:
            write(folder, MAPPING_FILE, (before, *new))


def _list_failed(root: Path, failed: Sequence[Path]) -> None:
    """Write the list of files that were not converted; without one, an old list goes."""
    if failed:
        # A line is a path: what would break it is written as in a string of Python.
        lines = tuple(os.fsencode(one_line(str(path.absolute()))) + b"\n" for path in failed)
        write(root, FAILED_FILE, lines)
    else:
        (root / FAILED_FILE).unlink(missing_ok=True)


def _row(mapped: Mapped) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow((mapped.name, mapped.full_name))
    return os.fsencode(text.getvalue())
