"""Writes the hints of a job into the metadata of its tree, whole or not at all.

Jobs that share a tree share the file: each writes its own hints and leaves those of the others.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from rankdump.contract import roots as trees
from rankdump.contract.errors import DamagedError, RefusedError
from rankdump.contract.layout.mindspore_sync import METADATA_FOLDER
from rankdump.contract.timeouts import HINTS_FILE, TimeoutHint, hints_from_text, hints_to_text
from rankdumpd.coordinator.publish.files import make_folder, write_whole

_MAX_JOBS = 16
"""Jobs whose hints stay in the file of a tree; those written longest ago go first."""


def write_hints(
    root: str, job_id: str, hints: Iterable[TimeoutHint], *, roots: Sequence[str] = ()
) -> str:
    """Replace a job's hints in the file; return why that could not be, or nothing.

    `roots` are the folders that trees may be in, any when there are none.
    """
    if not root:
        return f"hints could not be written: no report has named the tree of job {job_id!r}"
    folder = Path(root) / METADATA_FOLDER
    try:
        trees.check(root, roots, resolve=os.path.realpath)
        folder.parent.mkdir(parents=True, exist_ok=True)
        make_folder(folder)
        others = _of_others(folder / HINTS_FILE, job_id)
        write_whole(folder / HINTS_FILE, (hints_to_text([*others, *hints]).encode(),))
    except (OSError, DamagedError, RefusedError) as error:
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
