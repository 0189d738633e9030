"""Which files of a tree belong to a job's order, and how much of them is committed.

Plain names belong to the first job that publishes into a tree, which `execution_order.job`
names; another job has its tag in the names. Files say less than the book: what stands behind the
committed bytes was torn by a crash. Without a book (the state was lost) what is there is kept,
but for the iteration that is about to be written: it was not committed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankdump.contract import roots as trees
from rankdump.contract.errors import DamagedError, UnavailableError
from rankdump.contract.order import (
    FINDINGS_FILE,
    HEADER,
    JOB_FILE,
    ORDER_FOLDER,
    finding_from_line,
    graph_and_tag,
    tag_of,
    tagged,
)
from rankdumpd.coordinator.publish.files import cut, make_folder, not_through_links
from rankdumpd.coordinator.values import Book

_LOG = logging.getLogger(__name__)
_HEADER = HEADER.encode()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job's order is written, its files cut to what is committed."""

    folder: Path
    tag: str
    sizes: dict[str, int]
    position: int

    def named(self, file_name: str) -> str:
        """Return the name that one of this job's files has."""
        return tagged(file_name, self.tag)


def opened(
    job_id: str, root: str, book: Book | None, *, roots: Sequence[str] = (), iteration: int = -1
) -> Place:
    """Return the place of a job; DamagedError, RefusedError, UnavailableError, OSError say why not.

    `roots` are the folders that trees may be in, any when there are none; `iteration` is the one
    that is to be written, if any.
    """
    if not root:
        raise UnavailableError(f"no report has named the tree of job {job_id!r}")
    trees.check(root, roots, resolve=os.path.realpath)
    folder = Path(root) / ORDER_FOLDER
    Path(root).mkdir(parents=True, exist_ok=True)
    make_folder(folder)
    tag = "" if _owner(folder / JOB_FILE, job_id) == job_id else tag_of(job_id)
    if book is None or book.root != root:
        return _found(folder, tag, iteration, 0 if book is None else book.position)
    sizes = {name: size for name, size in book.sizes.items() if _is_there(folder / name, size)}
    for name in _names(folder, tag):
        size = sizes.get(name, 0)
        if (folder / name).stat().st_size > size:
            _LOG.warning("%s: what stands behind %d bytes was not committed", folder / name, size)
            _check_ours(folder / name)
            cut(folder / name, size)
    return Place(folder, tag, sizes, book.position)


def _owner(path: Path, job_id: str) -> str:
    """Return the job that the plain names belong to: this one, when it is the first."""
    try:
        with open(path, "x", encoding="utf-8", newline="", opener=not_through_links) as file:
            file.write(job_id)
        return job_id
    except FileExistsError:
        return path.read_text(encoding="utf-8", errors="replace")


def _names(folder: Path, tag: str) -> list[str]:
    """Return the files of a job that are there and grow, in the order of their names."""
    findings = tagged(FINDINGS_FILE, tag)
    names = sorted(path.name for path in folder.iterdir())
    return [n for n in names if n == findings or (graph_and_tag(n) or (0, None))[1] == tag]


def _is_there(path: Path, size_bytes: int) -> bool:
    real = path.lstat().st_size if path.exists() else -1
    if real < size_bytes:
        _LOG.warning("%s is gone or was cut: its file begins anew", path)
    return real >= size_bytes


def _check_ours(path: Path) -> None:
    """DamagedError when a file begins as none of ours does."""
    with open(path, "rb", opener=not_through_links) as file:
        head = file.readline()
    if graph_and_tag(path.name):
        ours = _HEADER.startswith(head)
    else:
        ours = not head.endswith(b"\n") or head.startswith(b'{"kind"')
    if not ours:
        raise DamagedError(f"{path} is not of an execution order: it begins with {head[:80]!r}")


def _found(folder: Path, tag: str, iteration: int, position: int) -> Place:
    """Return the place with what its files hold, torn lines and the iteration's cut off."""
    sizes: dict[str, int] = {}
    for name in _names(folder, tag):
        _check_ours(folder / name)
        is_order = graph_and_tag(name) is not None
        number = _order_numbers if is_order else _finding_numbers
        size, next_position = _kept(folder / name, number, iteration)
        position = max(position, next_position)
        if size > is_order * len(_HEADER):
            sizes[name] = size
        cut(folder / name, sizes.get(name, 0))
    if sizes:
        _LOG.warning("%s: the order that is there goes on at position %d", folder, position)
    return Place(folder, tag, sizes, position)


_Numbers = Callable[[bytes], tuple[int, int]]


def _order_numbers(line: bytes) -> tuple[int, int]:
    """Return the iteration of a line, and the position that comes next."""
    if line == _HEADER:
        return -1, 0
    position, iteration, _ = line.split(b",", 2)
    return int(iteration), int(position) + 1


def _finding_numbers(line: bytes) -> tuple[int, int]:
    return finding_from_line(line.decode(errors="replace")).iteration, 0


def _kept(path: Path, numbers: _Numbers, iteration: int) -> tuple[int, int]:
    """Return the bytes before a torn last line and before a last iteration, and what is next."""
    size_bytes = at = next_position = 0
    for line in _whole_lines(path):
        try:
            of, following = numbers(line)
        except (ValueError, DamagedError):
            raise DamagedError(f"{path}: {line[:80]!r} is no line of it") from None
        at += len(line)
        if of != iteration:
            size_bytes, next_position = at, following
    return size_bytes, next_position


def _whole_lines(path: Path) -> Iterator[bytes]:
    with open(path, "rb", opener=not_through_links) as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line
            else:
                _LOG.warning("%s: %d bytes of a torn last line are cut off", path, len(line))
