"""Search for CANN's overflow records (Opdebug files) below a path, each with the operators of its
task. Works offline and never writes; unreadable files are listed as problems. Links are not
followed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from rankdump._analysis.reader.file_errors import named_errors, noted_errors
from rankdump._binfile.bin_file import open_bin_file
from rankdump._binfile.overflow_record import (
    UNKNOWN_FIELD,
    OpDebugRecord,
    OverflowSection,
    parse_overflow_record,
)
from rankdump._layout.file_name import (
    PACKED_SUFFIX,
    FileKind,
    FileName,
    LongFileNames,
    parse_file_name,
)
from rankdump._layout.tree_paths import MAPPING_FILE
from rankdump.errors import CorruptedError, UnsupportedError

MAX_FOLDER_DEPTH = 30
"""Largest number of folder levels below the first one, as in msaccucmp."""
_MAX_JSON_BYTES = 1 << 20
_MAX_MAPPING_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class OverflowHit:
    """A section of an overflow record, with the files of its operators."""

    section: OverflowSection
    files: tuple[tuple[FileName, str], ...]
    """Parsed names and names on disk of the files; one task may have several operators."""

    @property
    def operators(self) -> tuple[tuple[str, str], ...]:
        """Type and name of each operator, as files spell them."""
        return tuple(dict.fromkeys((name.op_type, name.op_name) for name, _ in self.files))


@dataclass(frozen=True, slots=True)
class OverflowRecord:
    """One overflow record in a file."""

    path: Path
    slot: int
    """Number of the record's output in a bin file."""
    timestamp_us: int | None
    """Time stamp in the name of the file."""
    content: OpDebugRecord
    hits: tuple[OverflowHit, ...]
    """The sections that report an overflow."""

    @property
    def from_json(self) -> bool:
        """Whether the record was read from a JSON file."""
        return self.path.suffix == ".json"


@dataclass(slots=True)
class OverflowSearch:
    """Result of a search; `problems` contains a sentence for each file that could not be read."""

    records: list[OverflowRecord] = field(default_factory=list[OverflowRecord])
    problems: list[str] = field(default_factory=list[str])
    file_count: int = 0
    """Number of all files in the searched folders."""


_DumpFile: TypeAlias = tuple[FileName, str]
"""A file in a folder: its parsed name and its name on disk."""
_FilesByTask: TypeAlias = dict[int, list[_DumpFile]]


def search_overflows(path: Path) -> OverflowSearch:
    """Return the overflow records of a file, or of a folder and the folders below it."""
    found = OverflowSearch()
    if path.is_dir():
        _search_folder(path, found, 0)
    else:
        files, _ = _list_folder(path.parent, found)
        _read_records(path, parse_file_name(path.name), _index_by_task(files), found)
    return found


def _search_folder(folder: Path, found: OverflowSearch, depth: int) -> None:
    files, folders = _list_folder(folder, found)
    by_task = _index_by_task(files)
    for name, on_disk in _select_overflow_files(files):
        _read_records(folder / on_disk, name, by_task, found)
    if folders and depth == MAX_FOLDER_DEPTH:
        found.problems.append(
            f"{folder}: more than {MAX_FOLDER_DEPTH} folders deep, not searched further"
        )
    else:
        for name in folders:
            _search_folder(folder / name, found, depth + 1)


def _list_folder(folder: Path, found: OverflowSearch) -> tuple[list[_DumpFile], list[str]]:
    """Return the dump files and the folders in a folder, both sorted by name."""
    names, folders = list[str](), list[str]()
    with noted_errors(found.problems), named_errors(folder), os.scandir(folder) as listed:
        items = sorted(listed, key=lambda item: item.name)
        names = [item.name for item in items if item.is_file(follow_symlinks=False)]
        folders = [item.name for item in items if item.is_dir(follow_symlinks=False)]
    found.file_count += len(names)
    try:
        long = _read_long_names(folder / MAPPING_FILE) if MAPPING_FILE in names else LongFileNames()
    except (OSError, CorruptedError) as error:
        found.problems.append(f"{folder / MAPPING_FILE}: cannot be read: {error}")
        long = LongFileNames()
    read = ((parse_file_name(long.get_full_name(name)), name) for name in names)
    return [(name, on_disk) for name, on_disk in read if name is not None], folders


def _index_by_task(files: list[_DumpFile]) -> _FilesByTask:
    """Return the files of operators, by task number."""
    found: _FilesByTask = {}
    for name, on_disk in files:
        if not name.is_overflow:
            found.setdefault(name.task, []).append((name, on_disk))
    return found


def _read_long_names(path: Path) -> LongFileNames:
    size = path.stat().st_size
    if size > _MAX_MAPPING_BYTES:
        raise CorruptedError(f"{size} bytes, at most {_MAX_MAPPING_BYTES} expected")
    return LongFileNames.parse(path.read_bytes())


def _select_overflow_files(files: list[_DumpFile]) -> Iterator[_DumpFile]:
    """Yield the overflow files; a JSON file only if its binary source is missing."""
    debug = [(name, on_disk) for name, on_disk in files if name.is_overflow]
    plain = {
        on_disk.removesuffix(PACKED_SUFFIX)
        for name, on_disk in debug
        if name.kind is FileKind.OVERFLOW
    }
    for name, on_disk in debug:
        kind, source = name.kind, on_disk.partition(".output.")[0]
        if kind is FileKind.OVERFLOW or (kind is FileKind.OVERFLOW_JSON and source not in plain):
            yield name, on_disk


def _read_records(
    path: Path, name: FileName | None, by_task: _FilesByTask, found: OverflowSearch
) -> None:
    try:
        for slot, content in _read_contents(path, name):
            hits = tuple(
                OverflowHit(each, _find_operator_files(each, by_task))
                for each in content.overflowed_sections
            )
            stamp = name.timestamp_us if name else None
            found.records.append(OverflowRecord(path, slot, stamp, content, hits))
    except (CorruptedError, UnsupportedError) as error:
        text = str(error)
        found.problems.append(text if text.startswith(f"{path}: ") else f"{path}: {text}")


def _read_contents(path: Path, name: FileName | None) -> Iterator[tuple[int, OpDebugRecord]]:
    if path.suffix == ".json":
        yield name.slot if name else 0, OpDebugRecord.from_json(_read_text(path))
        return
    opened = open_bin_file(path)
    outputs = [payload for payload in opened.payloads if payload.kind == "output"]
    if not outputs:
        raise CorruptedError("the file has no output and therefore no overflow record")
    for payload in outputs:
        yield payload.index, parse_overflow_record(opened.read_payload(payload))


def _read_text(path: Path) -> bytes:
    if not path.is_file():
        raise CorruptedError("not a regular file")
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_JSON_BYTES + 1)
    except OSError as error:
        raise CorruptedError(f"cannot be read: {error.strerror}") from None
    if len(text) > _MAX_JSON_BYTES:
        raise CorruptedError(f"more than {_MAX_JSON_BYTES} bytes, too large for an overflow record")
    return text


def _find_operator_files(section: OverflowSection, by_task: _FilesByTask) -> tuple[_DumpFile, ...]:
    files = by_task.get(section.get_field("task_id") or 0, [])
    return tuple(file for file in files if _is_operator_of(section, file[0]))


def _is_operator_of(section: OverflowSection, name: FileName) -> bool:
    pairs = (
        (name.stream, section.get_field("stream_id")),
        (name.context, section.get_field("context_id")),
        (name.thread, section.get_field("thread_id")),
    )
    # Ids are compared only if both are known; 65535 means unknown.
    return all(UNKNOWN_FIELD in pair or pair[1] in (None, pair[0]) for pair in pairs)
