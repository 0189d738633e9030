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
    hidden: tuple[Path, ...] = ()
    """Files named like bin files but for a dot in front, which are left alone."""


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

    every = sorted(_files(source, out.resolve(), unreadable, recursive=recursive))
    for path in (path for path in every if not path.name.startswith(".")):
        if not path.is_file():
            problems.append(Failure(path, "no regular file"))
            continue
        folder = out / path.parent.relative_to(source)
        job = _job(path, folder)
        place = folder / plain_name(path.name)
        if place in jobs:
            other = jobs[place].path.name
            problems.append(Failure(path, f"{other} becomes files of the same names"))
        else:
            jobs[place] = job
    hidden = tuple(path for path in every if path.name.startswith("."))
    return Found(tuple(jobs.values()), tuple(problems), hidden)


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
        yield from (here / name for name in files if numbered(name.removeprefix(".")))


def _job(path: Path, folder: Path) -> Job:
    try:
        return Job(path, folder, path.stat().st_size)
    except OSError:
        return Job(path, folder)
