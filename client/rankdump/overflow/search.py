"""A path to its overflow files, each with the operators of the same task. Never writes.

What cannot be read is named and the search goes on; links are not followed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from rankdump.contract.errors import DamagedError, UnsupportedError
from rankdump.contract.layout.file_name import PACKED, FileKind, FileName, parsed
from rankdump.contract.layout.long_names import LongNames
from rankdump.contract.layout.place import MAPPING_FILE
from rankdump.contract.opdebug import UNKNOWN_ID, OpDebug, Section, opdebug
from rankdump.dumpdata import open_bin

MAX_DEPTH = 30
"""Folders below the first, as msaccucmp goes down."""
_MAX_JSON_BYTES = 1 << 20
_MAX_MAPPING_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Hit:
    """A section of a record, and the files of the operator that it speaks of."""

    section: Section
    files: tuple[tuple[FileName, str], ...]
    """What the names say, and the names on disk; operators of one task may be several."""

    @property
    def operators(self) -> tuple[tuple[str, str], ...]:
        """Type and name of each operator, as files spell them."""
        return tuple(dict.fromkeys((name.op_type, name.op_name) for name, _ in self.files))


@dataclass(frozen=True, slots=True)
class Record:
    """One record of one file."""

    path: Path
    slot: int
    """Which output of a bin file it is."""
    timestamp_us: int | None
    """From the name."""
    content: OpDebug
    hits: tuple[Hit, ...]
    """The sections with an overflow."""

    @property
    def from_json(self) -> bool:
        """Whether it was read from JSON already."""
        return self.path.suffix == ".json"


@dataclass(slots=True)
class Search:
    """Everything found; `problems` names what could not be read."""

    records: list[Record] = field(default_factory=list[Record])
    problems: list[str] = field(default_factory=list[str])
    files: int = 0
    """Files of any kind in the folders that were listed."""


@dataclass(frozen=True, slots=True)
class _File:
    """A file of a folder: what its name says, and its name on disk."""

    name: FileName
    on_disk: str


_ByTask: TypeAlias = dict[int, list[_File]]


def search(path: Path) -> Search:
    """Return the records of a file, or of a folder and the folders below it."""
    found = Search()
    if path.is_dir():
        for folder in _folders(path, found):
            files = _listing(folder, found)
            by_task = _by_task(files)
            for file in _records_of(files):
                _take(folder / file.on_disk, file.name, by_task, found)
    else:
        files = _listing(path.parent, found)
        _take(path, parsed(path.name), _by_task(files), found)
    return found


def _folders(root: Path, found: Search) -> Iterator[Path]:
    open_folders = [(root, 0)]
    while open_folders:
        folder, depth = open_folders.pop()
        yield folder
        try:
            with os.scandir(folder) as listed:
                names = sorted(e.name for e in listed if e.is_dir(follow_symlinks=False))
        except OSError:
            continue  # named where its files are listed
        if names and depth == MAX_DEPTH:
            found.problems.append(f"{folder}: deeper than {MAX_DEPTH} folders, not looked into")
        else:
            open_folders += [(folder / name, depth + 1) for name in reversed(names)]


def _listing(folder: Path, found: Search) -> list[_File]:
    """Return the dump files of a folder, in the order of their names."""
    try:
        with os.scandir(folder) as listed:
            names = sorted(e.name for e in listed if e.is_file(follow_symlinks=False))
            found.files += len(names)
    except OSError as error:
        found.problems.append(f"{folder}: cannot be read: {error.strerror}")
        return []
    try:
        long = _long_names(folder / MAPPING_FILE) if MAPPING_FILE in names else LongNames()
    except (OSError, DamagedError) as error:
        found.problems.append(f"{folder / MAPPING_FILE}: cannot be read: {error}")
        long = LongNames()
    read = ((parsed(long.full(name)), name) for name in names)
    return [_File(name, on_disk) for name, on_disk in read if name is not None]


def _by_task(files: list[_File]) -> _ByTask:
    """Return the operators' files by the number of their task."""
    found: _ByTask = {}
    for file in files:
        if not file.name.debug:
            found.setdefault(file.name.task, []).append(file)
    return found


def _long_names(path: Path) -> LongNames:
    size = path.stat().st_size
    if size > _MAX_MAPPING_BYTES:
        raise DamagedError(f"{size} bytes, at most {_MAX_MAPPING_BYTES} expected")
    return LongNames.parsed(path.read_bytes())


def _records_of(files: list[_File]) -> Iterator[_File]:
    """Yield the overflow files; JSON only where what it was made from is not there."""
    debug = [file for file in files if file.name.debug]
    plain = {f.on_disk.removesuffix(PACKED) for f in debug if f.name.kind is FileKind.OVERFLOW}
    for file in debug:
        kind, source = file.name.kind, file.on_disk.partition(".output.")[0]
        if kind is FileKind.OVERFLOW or (kind is FileKind.OVERFLOW_JSON and source not in plain):
            yield file


def _take(path: Path, name: FileName | None, by_task: _ByTask, found: Search) -> None:
    try:
        for slot, content in _contents(path, name):
            hits = tuple(Hit(each, _files_of(each, by_task)) for each in content.overflowed)
            stamp = name.timestamp_us if name else None
            found.records.append(Record(path, slot, stamp, content, hits))
    except (DamagedError, UnsupportedError) as error:
        text = str(error)
        found.problems.append(text if text.startswith(f"{path}: ") else f"{path}: {text}")


def _contents(path: Path, name: FileName | None) -> Iterator[tuple[int, OpDebug]]:
    if path.suffix == ".json":
        yield name.slot if name else 0, OpDebug.from_json(_text(path))
        return
    opened = open_bin(path)
    outputs = [payload for payload in opened.payloads if payload.kind == "output"]
    if not outputs:
        raise DamagedError("no output in it, and so no overflow record")
    for payload in outputs:
        yield payload.index, opdebug(opened.bytes_of(payload))


def _text(path: Path) -> bytes:
    if not path.is_file():
        raise DamagedError("no regular file")
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_JSON_BYTES + 1)
    except OSError as error:
        raise DamagedError(f"cannot be read: {error.strerror}") from None
    if len(text) > _MAX_JSON_BYTES:
        raise DamagedError(f"more than {_MAX_JSON_BYTES} bytes, which no overflow record has")
    return text


def _files_of(section: Section, by_task: _ByTask) -> tuple[tuple[FileName, str], ...]:
    files = by_task.get(section.field("task_id") or 0, [])
    return tuple((file.name, file.on_disk) for file in files if _speaks_of(section, file.name))


def _speaks_of(section: Section, name: FileName) -> bool:
    pairs = (
        (name.stream, section.field("stream_id")),
        (name.context, section.field("context_id")),
        (name.thread, section.field("thread_id")),
    )
    # Neither has to say it: 65535 stands for an id that is not known.
    return all(UNKNOWN_ID in pair or pair[1] in (None, pair[0]) for pair in pairs)
