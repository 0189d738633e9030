"""Dump of msprobe as a tree: the calls and tensors in dump.json, and the files that it names.

The root may be that of the whole dump, of a step, or of one rank, or the dump.json of one rank.
Reads names, and the dump.json of the selected ranks and steps, but no tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path

from rankdump._analysis.reader.file_errors import named_errors, noted_errors
from rankdump._analysis.reader.foreign_files import make_entries, read_start
from rankdump._analysis.reader.query import Query
from rankdump._analysis.reader.tree import Entries, Entry, Table, Tree
from rankdump._layout.foreign_calls import CallPlace, ForeignCall
from rankdump._layout.msprobe_dump import (
    DUMP_FILES,
    STACK_FILE,
    TENSOR_FOLDER,
    parse_dump_file,
    parse_rank_folder,
    parse_step_folder,
)
from rankdump.errors import CorruptedError

MSPROBE = "msprobe"
_MARKS = (b'"task"', b'"level"')


@dataclass(frozen=True, slots=True)
class MsprobeFolder:
    """Folder of one rank in one step."""

    path: Path
    place: CallPlace
    dump_file: str = ""
    """Name of its dump.json; empty if there is none."""

    def join_name(self, root: Path, name: str) -> str:
        """Return the path, relative to the root, of a name in this folder."""
        below = self.path.relative_to(root).as_posix()
        return name if below == "." else f"{below}/{name}"


def is_msprobe_dump(root: Path) -> bool:
    """Return whether a path is a dump of msprobe, a step of it, a rank of it or a dump.json."""
    if root.is_file():
        return root.name in DUMP_FILES and _is_dump_file(root)
    return any(True for _ in _find_folders(root))


def _sort_folders(root: Path) -> list[MsprobeFolder]:
    """Return the folders of ranks, sorted by iteration and rank.

    CorruptedError if several processes without a rank number wrote to the same step.
    """
    found = sorted(_find_folders(_find_base(root)), key=lambda each: (each.place, each.path.name))
    for one, other in pairwise(found):
        if one.place == other.place:
            raise CorruptedError(
                f"{one.path.parent}: {one.path.name} and {other.path.name} are both of rank "
                f"{one.place.rank}, iteration {one.place.iteration}: name one of the two folders"
            )
    return found


def read_msprobe_tree(root: Path, queries: Sequence[Query]) -> Tree:
    """Return the tree of a dump, restricted to the places that the queries select."""
    folders, root = _sort_folders(root), _find_base(root)
    problems: list[str] = []
    batches: list[list[Entry]] = []
    tables: list[Table] = []
    for folder in sorted(folders, key=lambda each: each.place):
        place = folder.place
        if not all(query.keeps_place(place.rank, 0, place.iteration) for query in queries):
            continue
        if not folder.dump_file:
            name = folder.join_name(root, DUMP_FILES[0])
            problems.append(
                f"{name}: missing or empty, so the files in {TENSOR_FOLDER} have no order: msprobe "
                "writes it at the end of a step, and a job that was killed has lost it"
            )
            continue
        path = folder.join_name(root, folder.dump_file)
        table = Table(root, path, place.rank, "", 0, place.iteration, form=MSPROBE)
        tables.append(table)
        with noted_errors(problems):
            batches.append(_read_entries(root, folder, read_msprobe_calls(table), problems))
    return Tree(
        root=root,
        ranks=tuple(sorted({each.place.rank for each in folders})),
        entries=Entries.of(root, batches),
        manifests=(),
        tables=tuple(sorted(tables, key=lambda table: (table.rank, table.iteration))),
        problems=tuple(problems),
        queries=tuple(queries),
        tool=MSPROBE,
    )


def read_folder_around(folder: Path) -> Entries:
    """Return the tensors of the rank whose files are in a folder; none if the folder is
    in no dump.
    """
    if folder.name != TENSOR_FOLDER or not is_msprobe_dump(folder.parent):
        return Entries.of(folder, ())
    return read_msprobe_tree(folder.parent, ()).entries


def find_dump_file(entry: Entry) -> Path | None:
    """Return the dump.json that describes a tensor; None for a tensor of another dump."""
    folder = entry.path.parent
    found = _make_folder(folder.parent, 0, 0) if folder.name == TENSOR_FOLDER else None
    return folder.parent / found.dump_file if found is not None and found.dump_file else None


def read_msprobe_calls(table: Table) -> list[ForeignCall]:
    """Return the calls in a dump.json; CorruptedError names the file."""
    with named_errors(table.path):
        return parse_dump_file(table.path.read_bytes())


def find_stack_files(root: Path) -> list[tuple[Path, CallPlace]]:
    """Return the stack files of a dump; all stack files of a rank have the same calls."""
    files = ((folder.path / STACK_FILE, folder.place) for folder in _sort_folders(root))
    return [(path, place) for path, place in files if path.is_file()]


def _find_base(root: Path) -> Path:
    return root.parent if root.is_file() else root


def _find_folders(root: Path) -> Iterator[MsprobeFolder]:
    """Yield the folders of ranks below a root; the root itself may be one."""
    own = root.absolute()
    rank = parse_rank_folder(own.name)
    step = parse_step_folder(own.name if rank is None else own.parent.name) or 0
    known = _make_folder(root, rank or 0, step)
    if known is not None:
        yield known
        return
    steps = chain([(root, step)], _list_folders(root, parse_step_folder))
    for folder, iteration in steps:
        for path, number in _list_folders(folder, parse_rank_folder):
            known = _make_folder(path, number, iteration)
            if known is not None:
                yield known


def _make_folder(path: Path, rank: int, iteration: int) -> MsprobeFolder | None:
    place = CallPlace(rank, iteration)
    for name in DUMP_FILES:
        if _is_dump_file(path / name):
            return MsprobeFolder(path, place, name)
    return MsprobeFolder(path, place) if (path / TENSOR_FOLDER).is_dir() else None


def _is_dump_file(path: Path) -> bool:
    with suppress(OSError):
        start = read_start(path) if path.is_file() else b""
        return all(mark in start for mark in _MARKS)
    return False


def _list_folders(
    root: Path, parse_name: Callable[[str], int | None]
) -> Iterator[tuple[Path, int]]:
    try:
        items = sorted(root.iterdir())
    except OSError:
        return
    for item in items:
        number = parse_name(item.name)
        if number is not None and item.is_dir():
            yield item, number


def _read_entries(
    root: Path, folder: MsprobeFolder, calls: Sequence[ForeignCall], problems: list[str]
) -> list[Entry]:
    """Return the tensors of a folder; add a problem for each file that is missing or that dump.json
    does not name.
    """
    named = [tensor.file for call in calls for tensor in call.tensors if tensor.file]
    where = folder.join_name(root, TENSOR_FOLDER)
    file_bytes = _measure_files(folder.path / TENSOR_FOLDER)
    if not named and not file_bytes:
        return []
    problems += [
        f"{where}/{name}: named by {folder.dump_file}, but missing"
        for name in dict.fromkeys(named)
        if name not in file_bytes
    ]
    others = file_bytes.keys() - set(named)
    if others:
        count, first = len(others), min(others)
        problems.append(
            f"{where}: {folder.dump_file} does not name {count} of its files, such as {first}: "
            "msprobe wrote them after it"
        )
    return list(make_entries(root, folder.place, where, calls, file_bytes))


def _measure_files(folder: Path) -> dict[str, int]:
    """Return the sizes of the files in a folder by name; empty if the folder cannot be listed."""
    try:
        with os.scandir(folder) as items:
            return {item.name: item.stat().st_size for item in items if item.is_file()}
    except OSError:
        return {}
