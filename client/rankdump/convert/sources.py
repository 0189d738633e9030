"""Which files of a folder are to be converted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rankdump.contract.layout.file_name import numbered
from rankdump.convert.names import plain_name
from rankdump.convert.request import Failure, Job


@dataclass(frozen=True, slots=True)
class Found:
    """The files to convert, and what cannot be: a name that is taken, a folder."""

    jobs: tuple[Job, ...]
    problems: tuple[Failure, ...] = ()


def find(source: Path, out: Path, *, recursive: bool = False) -> Found:
    """Return the bin files of a folder, or the one file; the folders below only when asked for.

    Links to folders are not followed. Of a folder only what is named like a bin file is taken.
    """
    if not source.is_dir():
        return Found((_job(source, out),))
    jobs: dict[Path, Job] = {}
    problems: list[Failure] = []

    def unreadable(error: OSError) -> None:
        problems.append(Failure(Path(error.filename), f"cannot be listed: {error.strerror}"))

    for path in sorted(_files(source, out.resolve(), unreadable, recursive=recursive)):
        folder = out / path.parent.relative_to(source)
        job = _job(path, folder)
        place = folder / plain_name(path.name)
        if place in jobs:
            other = jobs[place].path.name
            problems.append(Failure(path, f"{other} becomes files of the same names"))
        else:
            jobs[place] = job
    return Found(tuple(jobs.values()), tuple(problems))


def _files(
    source: Path, out: Path, unreadable: Callable[[OSError], None], *, recursive: bool
) -> Iterator[Path]:
    for folder, below, files in os.walk(source, onerror=unreadable):
        here = Path(folder)
        below[:] = [
            name
            for name in below
            if recursive and not name.startswith(".") and (here / name).resolve() != out
        ]
        yield from (here / name for name in files if _may_be_bin(here / name))


def _may_be_bin(path: Path) -> bool:
    return not path.name.startswith(".") and numbered(path.name) and path.is_file()


def _job(path: Path, folder: Path) -> Job:
    try:
        return Job(path, folder, path.stat().st_size)
    except OSError:
        return Job(path, folder)
