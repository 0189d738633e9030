"""Source and output folders of a conversion: the search for bin files, and the writing of a file.
An output file has a hidden name until it is complete; nothing is written outside the output folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankdump._layout.file_name import PACKED_SUFFIX, is_numbered_name
from rankdump.errors import CorruptedError

_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class ConversionJob:
    """One file to convert, with its output folder."""

    path: Path
    folder: Path
    bytes_stored: int = 0


@dataclass(frozen=True, slots=True)
class ConversionFailure:
    """A problem with a file: a failure, or a warning."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class ConversionSources:
    """The files to convert, and failures for files that have names of bin files and cannot be
    converted.
    """

    jobs: tuple[ConversionJob, ...]
    problems: tuple[ConversionFailure, ...] = ()
    hidden: tuple[Path, ...] = ()
    """Files whose names are a dot and the name of a bin file; they are not converted."""


def find_bin_files(source: Path, out: Path, *, recursive: bool = False) -> ConversionSources:
    """Return the source if it is a file, else the bin files in the folder; with `recursive`, in all
    folders below, too.

    Links to folders are not followed. Files in a folder that do not have the name of a bin file are
    skipped.
    """
    if not source.is_dir():
        return ConversionSources((_make_job(source, out),))
    jobs: dict[Path, ConversionJob] = {}
    problems: list[ConversionFailure] = []

    def unreadable(error: OSError) -> None:
        problems.append(
            ConversionFailure(Path(error.filename), f"cannot be listed: {error.strerror}")
        )

    every = sorted(_walk_files(source, out.resolve(), unreadable, recursive=recursive))
    for path in (path for path in every if not path.name.startswith(".")):
        if not path.is_file():
            problems.append(ConversionFailure(path, "not a regular file"))
            continue
        folder = out / path.parent.relative_to(source)
        job = _make_job(path, folder)
        place = folder / path.name.removesuffix(PACKED_SUFFIX)
        if place in jobs:
            other = jobs[place].path.name
            problems.append(
                ConversionFailure(path, f"{other} is converted to files of the same names")
            )
        else:
            jobs[place] = job
    hidden = tuple(path for path in every if path.name.startswith("."))
    return ConversionSources(tuple(jobs.values()), tuple(problems), hidden)


def _walk_files(
    source: Path, out: Path, unreadable: Callable[[OSError], None], *, recursive: bool
) -> Iterator[Path]:
    for folder, below, files in os.walk(source, onerror=unreadable):
        here = Path(folder)
        below[:] = [
            name
            for name in below
            if recursive and not name.startswith(".") and (here / name).resolve() != out
        ]
        yield from (here / name for name in files if is_numbered_name(name.removeprefix(".")))


def _make_job(path: Path, folder: Path) -> ConversionJob:
    try:
        return ConversionJob(path, folder, path.stat().st_size)
    except OSError:
        return ConversionJob(path, folder)


def escape_line(name: str) -> str:
    """Return a name with control characters and line separators escaped."""
    return _CONTROL_CHARACTERS.sub(lambda found: found[0].encode("unicode_escape").decode(), name)


def make_output_folder(root: Path, folder: Path) -> None:
    """Create an output folder and its parents; CorruptedError when a link leads out of the root."""
    if not folder.resolve().is_relative_to(root.resolve()):
        raise CorruptedError(f"{folder}: a symbolic link leads out of {root}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def write_output(folder: Path, name: str, parts: Sequence[bytes | memoryview]) -> int:
    """Create or replace a file, without following a link with its name; return the number of bytes
    written.
    """
    hidden = folder / f".{uuid.uuid4().hex}.tmp"
    try:
        with os.fdopen(os.open(hidden, _CREATE_FLAGS, 0o666), "wb") as file:
            for part in parts:
                file.write(part)
        hidden.replace(folder / name)
    except BaseException:
        with contextlib.suppress(OSError):
            hidden.unlink()
        raise
    return sum(map(len, parts))
