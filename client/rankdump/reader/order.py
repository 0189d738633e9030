"""The merged order of a tree, from the files the coordinator published. Reads only those."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from rankdump.contract.errors import DamagedError
from rankdump.contract.order import FINDINGS_FILE, ORDER_FILE, ORDER_FOLDER, from_row
from rankdump.contract.status import OrderEntry

_STEM, _SUFFIX = ORDER_FILE.rsplit(".", 1)
_FINDINGS_STEM, _FINDINGS_SUFFIX = FINDINGS_FILE.rsplit(".", 1)


@dataclass(frozen=True, slots=True)
class PublishedOrder:
    """What one job's files say."""

    path: Path
    entries: tuple[OrderEntry, ...]
    findings: tuple[str, ...]
    """What the merge found: mismatches, missing members, cycles."""
    others: tuple[str, ...] = ()
    """Names of the order files that other jobs left in the same tree."""


def read_order(root: Path) -> PublishedOrder:
    """Return the order published last in a tree; DamagedError names the file and line at fault."""
    folder = root / ORDER_FOLDER
    found = [path for path in folder.glob(f"{_STEM}*.{_SUFFIX}") if path.is_file()]
    files = sorted(found, key=lambda path: path.stat().st_mtime_ns)
    if not files:
        raise DamagedError(f"{folder / ORDER_FILE}: not there: no order has been published")
    path = files.pop()
    tag = path.name.removeprefix(_STEM).removesuffix(f".{_SUFFIX}")
    return PublishedOrder(
        path=path,
        entries=_entries(path),
        findings=_lines(folder / f"{_FINDINGS_STEM}{tag}.{_FINDINGS_SUFFIX}"),
        others=tuple(other.name for other in files),
    )


def _entries(path: Path) -> tuple[OrderEntry, ...]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            return tuple(_entry(row, path, rows.line_num) for row in rows)
    except OSError as error:
        raise DamagedError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise DamagedError(f"{path}: {error}") from None


def _entry(row: dict[str, str], path: Path, line: int) -> OrderEntry:
    try:
        return from_row(row)
    except DamagedError as error:
        raise DamagedError(f"{path}, line {line}: {error}") from None


def _lines(path: Path) -> tuple[str, ...]:
    try:
        return tuple(path.read_text(encoding="utf-8", errors="replace").splitlines())
    except FileNotFoundError:
        return ()
    except OSError as error:
        return (f"{path}: cannot be read: {error.strerror}",)
