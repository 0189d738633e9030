"""Writes the hints of a job into the metadata of its tree, whole or not at all.

Jobs that share a tree share the file: each writes its own hints and leaves those of the others.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from rankdump.contract.errors import DamagedError
from rankdump.contract.layout.mindspore_sync import METADATA_FOLDER
from rankdump.contract.timeouts import HINTS_FILE, TimeoutHint, hints_from_text, hints_to_text

_MAX_JOBS = 16
"""Jobs whose hints stay in the file of a tree; those written longest ago go first."""


def write_hints(root: str, job_id: str, hints: Iterable[TimeoutHint]) -> str:
    """Replace a job's hints in the file; return why that could not be, or nothing."""
    if not root:
        return f"hints could not be written: no report has named the tree of job {job_id!r}"
    folder = Path(root) / METADATA_FOLDER
    try:
        if folder.is_symlink():
            raise OSError(f"{folder} is a symbolic link: it may lead out of the tree")
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        others = _of_others(folder / HINTS_FILE, job_id)
        _replace(folder, hints_to_text([*others, *hints]))
    except OSError as error:
        return f"hints could not be written: {error}"
    return ""


def _of_others(path: Path, job_id: str) -> list[TimeoutHint]:
    """Return what stands there of other jobs; a damaged file is written anew."""
    try:
        if path.is_symlink():
            return []
        written = hints_from_text(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, UnicodeDecodeError, DamagedError):
        return []
    jobs = [job for job in dict.fromkeys(hint.job_id for hint in written) if job != job_id]
    kept = set(jobs[1 - _MAX_JOBS :])
    return [hint for hint in written if hint.job_id in kept]


def _replace(folder: Path, text: str) -> None:
    temporary = folder / f".{HINTS_FILE}.tmp"
    with open(temporary, "w", encoding="utf-8", opener=_not_through_links) as file:
        file.write(text)
    temporary.replace(folder / HINTS_FILE)


def _not_through_links(path: str, flags: int) -> int:
    """Open a file that those may read whom the folder's owner let in."""
    mode = Path(path).parent.stat().st_mode & 0o644 | 0o600
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
