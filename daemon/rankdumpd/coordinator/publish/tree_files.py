"""Files of the published order in a tree, and the file of hints. Files are never opened through
links, have no more permissions than the tree, and are written as a whole or not at all.

Jobs that share a tree share the file of hints: each job replaces its own hints and keeps those of
the other jobs.
"""

from __future__ import annotations

import io
import os
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path

from rankdump._core import tree_root as trees
from rankdump._core.timeouts import HINTS_FILE, TimeoutHint, format_hints, parse_hints
from rankdump._layout.tree_paths import METADATA_FOLDER
from rankdump.errors import CorruptedError, RejectedError


def make_tree_folder(folder: Path) -> None:
    """Create a folder within the mode of its parent; CorruptedError when its path is a link."""
    if folder.is_symlink():
        raise CorruptedError(f"{folder} is a symbolic link: it may lead out of the tree")
    folder.mkdir(mode=limit_mode(folder.parent, 0o755) | 0o700, exist_ok=True)


def open_without_links(path: str, flags: int) -> int:
    """Open a file, as the `opener` of `open`, with a mode limited by the mode of its folder."""
    mode = limit_mode(Path(path).parent, 0o644) | 0o600
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def limit_mode(folder: Path, mode: int) -> int:
    """Return a mode without the bits that the folder's mode lacks, to keep the restrictions of its
    owner.
    """
    return folder.stat().st_mode & mode


def append_chunks(path: Path, chunks: Iterable[bytes], *, size_bytes: int) -> int:
    """Write chunks after the first `size_bytes` bytes of a file and sync them; return the new size.

    On failure the file is truncated again, so that it contains no partial iteration.
    """
    with open(path, "ab", buffering=0, opener=open_without_links) as file:
        file.truncate(size_bytes)
        try:
            size = size_bytes + sum(write_fully(file, chunk) for chunk in chunks)
            # The offsets survive a power loss, so the bytes that they count must survive it, too.
            os.fsync(file.fileno())
            return size
        except BaseException:
            file.truncate(size_bytes)
            raise


def truncate_file(path: Path, size_bytes: int) -> None:
    """Truncate a file to `size_bytes` bytes, or remove it if that is 0."""
    if not size_bytes:
        path.unlink(missing_ok=True)
        return
    with open(path, "r+b", opener=open_without_links) as file:
        file.truncate(size_bytes)


@contextmanager
def open_whole_file(path: Path) -> Generator[io.BufferedWriter, None, None]:
    """Open a file for writing; at the end of the block it appears as a whole, or not at all."""
    unfinished = path.with_name(f".{path.name}.tmp")
    try:
        with open(unfinished, "wb", opener=open_without_links) as file:
            yield file
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write_whole_file(path: Path, chunks: Iterable[bytes]) -> None:
    """Write a file that appears as a whole or not at all."""
    with open_whole_file(path) as file:
        file.writelines(chunks)


def write_fully(file: io.FileIO, data: bytes) -> int:
    """Write all of the data, although one call may write only a part when the disk is
    nearly full.
    """
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
    return len(data)


_MAX_HINT_JOBS = 16
"""Largest number of jobs whose hints stay in the file of a tree; the hints that were written
longest ago are removed first.
"""


def write_hints(
    root: str, job_id: str, hints: Iterable[TimeoutHint], *, roots: Sequence[str] = ()
) -> str:
    """Replace the hints of a job in the file; return why that failed, or an empty text.

    `roots` are the folders that trees may be in; if empty, trees may be anywhere.
    """
    if not root:
        return f"hints could not be written: no agent has reported the tree of job {job_id!r}"
    folder = Path(root) / METADATA_FOLDER
    try:
        trees.check_root(root, roots, resolve=os.path.realpath)
        folder.parent.mkdir(parents=True, exist_ok=True)
        make_tree_folder(folder)
        others = _read_other_hints(folder / HINTS_FILE, job_id)
        write_whole_file(folder / HINTS_FILE, (format_hints([*others, *hints]).encode(),))
    except (OSError, CorruptedError, RejectedError) as error:
        return f"hints could not be written: {error}"
    return ""


def _read_other_hints(path: Path, job_id: str) -> list[TimeoutHint]:
    """Return the hints of other jobs; none if the file is damaged."""
    try:
        if path.is_symlink():
            return []
        stored = parse_hints(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, UnicodeDecodeError, CorruptedError):
        return []
    jobs = [job for job in dict.fromkeys(hint.job_id for hint in stored) if job != job_id]
    kept = set(jobs[1 - _MAX_HINT_JOBS :])
    return [hint for hint in stored if hint.job_id in kept]
