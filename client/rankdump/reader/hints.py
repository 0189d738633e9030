"""The timeout hints of a tree, from the file the coordinator keeps."""

from __future__ import annotations

from pathlib import Path

from rankdump.contract.errors import DamagedError
from rankdump.contract.layout.mindspore_sync import METADATA_FOLDER
from rankdump.contract.timeouts import HINTS_FILE, TimeoutHint, hints_from_text


def read_hints(root: Path, job_id: str = "") -> tuple[TimeoutHint, ...]:
    """Return the hints of a job, of the one written last without an id.

    DamagedError names the file and what is wrong with it, or that the job is not in it.
    """
    path = root / METADATA_FOLDER / HINTS_FILE
    try:
        hints = hints_from_text(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DamagedError(f"{path}: not there: no hints have been written") from None
    except OSError as error:
        raise DamagedError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, DamagedError) as error:
        raise DamagedError(f"{path}: {error}") from None
    jobs = list(dict.fromkeys(hint.job_id for hint in hints))
    if job_id and job_id not in jobs:
        raise DamagedError(
            f"{path}: no hints of job {job_id!r}; known: {', '.join(jobs) or 'none'}"
        )
    wanted = job_id or (jobs[-1] if jobs else "")
    return tuple(hint for hint in hints if hint.job_id == wanted)
