"""Writes the merged order into the tree of its job, iteration by iteration, and reads it back.

`execution_order.csv` belongs to the first job that publishes into a tree; `execution_order.job`
says which one that is. Another job in the same tree writes files with its own id in their names.
A coordinator that starts again goes on where the file ends. Never edits a line once written.
"""

from __future__ import annotations

import csv
import io
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rankdump.contract.errors import DamagedError, UnavailableError
from rankdump.contract.order import (
    COLUMNS,
    FINDINGS_FILE,
    JOB_FILE,
    ORDER_FILE,
    ORDER_FOLDER,
    from_row,
    of_another_job,
    to_row,
)
from rankdump.contract.status import OrderEntry
from rankdumpd.coordinator.values import GlobalOrder

_LOG = logging.getLogger(__name__)
_HEADER = (",".join(COLUMNS) + "\n").encode()
_BATCH = 10_000


@dataclass(slots=True)
class _Book:
    """The files of one job, and where the next entry goes."""

    order: Path
    findings: Path
    size_bytes: int
    position: int


class Publisher:
    """Appends to the files of every job; its owner calls from one thread at a time."""

    def __init__(self) -> None:
        self._books: dict[str, _Book] = {}

    def append(self, order: GlobalOrder, *, job_id: str, root: str) -> str:
        """Write an iteration, all of it or nothing; return why it could not be, or nothing."""
        try:
            if not root:
                raise UnavailableError(f"no report has named the tree of job {job_id!r}")
            _append_order(self._book(job_id, Path(root)), order)
        except (OSError, DamagedError, UnavailableError) as error:
            problem = f"{len(order)} entries could not be published: {error}"
            _LOG.error("job %s, iteration %d: %s", job_id, order.iteration, problem)
            return f"iteration {order.iteration}: {problem}"
        return ""

    def note(self, findings: Sequence[str], *, job_id: str) -> str:
        """Write findings beside the order; return why they could not be, or nothing."""
        book = self._books.get(job_id)
        if book is None or not findings:
            return ""
        try:
            _append_lines(book.findings, findings)
        except OSError as error:
            _LOG.error("job %s: findings could not be published: %s", job_id, error)
            return f"{len(findings)} findings could not be published: {error}"
        return ""

    def next_position(self, job_id: str) -> int:
        """Return the position that the next entry of a job gets."""
        book = self._books.get(job_id)
        return 0 if book is None else book.position

    def published(self, job_id: str) -> Iterator[OrderEntry]:
        """Return the entries published until now, in order, whatever is appended meanwhile."""
        book = self._books.get(job_id)
        return iter(()) if book is None else _entries(book.order, book.size_bytes)

    def _book(self, job_id: str, root: Path) -> _Book:
        book = self._books.get(job_id)
        if book is None or not _is_intact(book):
            self._books.pop(job_id, None)
            book = self._books[job_id] = _opened(job_id, root / ORDER_FOLDER)
        return book


def _is_intact(book: _Book) -> bool:
    """Return whether the file is as this process left it: a person may have removed it."""
    try:
        return book.order.stat().st_size == book.size_bytes
    except FileNotFoundError:
        return False


def _opened(job_id: str, folder: Path) -> _Book:
    if folder.is_symlink():
        raise DamagedError(f"{folder} is a symbolic link: it may lead out of the tree")
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=_open_as(folder.parent, 0o755) | 0o700, exist_ok=True)
    names = [ORDER_FILE, FINDINGS_FILE]
    if _owner(folder / JOB_FILE, job_id) != job_id:
        names = [of_another_job(name, job_id) for name in names]
    order, findings = (folder / name for name in names)
    size_bytes, position = _recovered(order)
    return _Book(order, findings, size_bytes, position)


def _owner(path: Path, job_id: str) -> str:
    """Return the job that the plain names belong to: this one, when it is the first."""
    try:
        with open(path, "x", encoding="utf-8", newline="", opener=_not_through_links) as file:
            file.write(job_id)
        return job_id
    except FileExistsError:
        return path.read_text(encoding="utf-8", errors="replace")


def _recovered(path: Path) -> tuple[int, int]:
    """Return the size of an order file and its next position; a torn last line is cut off."""
    with open(path, "a+b", opener=_not_through_links) as file:
        file.seek(0)
        header = file.readline()
        if header != _HEADER and _HEADER.startswith(header):
            file.truncate(0)
            file.write(_HEADER)
            return len(_HEADER), 0
        if header != _HEADER:
            raise DamagedError(f"{path} is no execution order: it begins with {header[:80]!r}")
        size_bytes, last = len(header), b""
        for line in file:
            if line.endswith(b"\n"):
                size_bytes, last = size_bytes + len(line), line
            else:
                _LOG.warning("%s: %d bytes of a torn last line are cut off", path, len(line))
        file.truncate(size_bytes)
    return size_bytes, _entry(path, last).position + 1 if last else 0


def _append_order(book: _Book, order: GlobalOrder) -> None:
    written = 0
    entries = order.entries(book.position)
    with open(book.order, "ab", buffering=0, opener=_not_through_links) as file:
        try:
            while rows := [to_row(entry) for entry in islice(entries, _BATCH)]:
                written += _write_all(file, _csv(rows))
        except BaseException:
            # Half an iteration would look like a whole one.
            file.truncate(book.size_bytes)
            raise
    book.size_bytes += written
    book.position += len(order)


def _append_lines(path: Path, lines: Iterable[str]) -> None:
    with open(path, "ab", buffering=0, opener=_not_through_links) as file:
        _write_all(file, "".join(f"{line}\n" for line in lines).encode())


def _write_all(file: io.FileIO, data: bytes) -> int:
    """Write all of the data: one call may take only a part when the disk is nearly full."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
    return len(data)


def _csv(rows: Iterable[Sequence[str]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _not_through_links(path: str, flags: int) -> int:
    mode = _open_as(Path(path).parent, 0o644) | 0o600
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def _open_as(folder: Path, mode: int) -> int:
    """Return what a folder's own mode leaves of another: the tree's owner chose who may read."""
    return folder.stat().st_mode & mode


def _entries(path: Path, size_bytes: int) -> Iterator[OrderEntry]:
    try:
        with open(path, "rb", opener=_not_through_links) as file:
            at = len(file.readline())
            while at < size_bytes and (line := file.readline()):
                at += len(line)
                yield _entry(path, line)
    except OSError as error:
        raise UnavailableError(f"execution order cannot be read: {error}") from None


def _entry(path: Path, line: bytes) -> OrderEntry:
    """Read one line; to_row sees to it that an entry is never more than one."""
    try:
        (fields,) = csv.reader([line.decode()], strict=True)
        return from_row(dict(zip(COLUMNS, fields, strict=True)))
    except (ValueError, csv.Error) as error:
        raise DamagedError(f"{path}: line {line[:80]!r}: {error}") from None
