"""Tables of figures: their last lines, and whether they have as many rows as manifests name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

from rankdump.contract.errors import DamagedError
from rankdump.contract.layout import statistic_csv
from rankdump.contract.layout.api_info import parse
from rankdump.contract.layout.api_tree import info_files_of
from rankdump.contract.layout.file_name import FileKind
from rankdump.contract.layout.folders import Names
from rankdump.contract.layout.reading import file_in
from rankdump.fsck.scan import read
from rankdump.fsck.values import Damage, Held, Kind, Seen
from rankdump.reader.manifests import Manifested

_Place: TypeAlias = "tuple[int, int | None]"
"""Rank and iteration; no iteration for constants."""


def check_rows(
    root: Path, everything: Iterable[Seen], manifests: Iterable[Held]
) -> Iterator[Damage]:
    """Yield tables that are cut, and iterations of which rows are missing."""
    held = list(manifests)
    known = Manifested(each.manifest for each in held)
    found: Counter[_Place] = Counter()
    apis: set[int] = set()
    for seen in everything:
        folder = seen.folder
        if folder is None or not seen.regular or not _is_table(seen):
            continue
        try:
            if folder.names is Names.API_TABLES:
                apis.add(folder.rank)
                found.update((folder.rank, step) for step in _steps(root, seen))
            else:
                place = known.rank_of(folder), None if folder.constant else folder.iteration
                found[place] += max(_lines(root, seen) - 1, 0)
        except DamagedError as error:
            yield Damage(Kind.TORN, seen.path, str(error))
    yield from _short(held, found, apis)


def _is_table(seen: Seen) -> bool:
    folder = seen.folder
    if folder is None or folder.names is Names.NONE:
        return False
    if folder.names is Names.API_TABLES:
        return info_files_of(seen.name) is not None
    says = file_in(folder, seen.full)
    own = statistic_csv.TABLE.fullmatch(seen.name) is not None
    return own or (says is not None and says.kind is FileKind.TABLE)


def _lines(root: Path, seen: Seen) -> int:
    data = bytes(read(root, seen.path))
    if data and not data.endswith(b"\n"):
        raise DamagedError("its last line has no end")
    return data.count(b"\n")


def _steps(root: Path, seen: Seen) -> list[int]:
    _lines(root, seen)
    text = bytes(read(root, seen.path)).decode("utf-8", "backslashreplace")
    lines = enumerate(text.split("\n"), start=1)
    return [parse(line, file=f"line {number}").step for number, line in lines if line.strip()]


def _short(held: list[Held], found: Counter[_Place], apis: set[int]) -> Iterator[Damage]:
    for each in held:
        status, records = each.manifest.status, each.manifest.records
        # Every tensor of an api dump has a line; of others those that have nothing else.
        rows = [r for r in records if status.rank in apis or not r.path]
        there = found[status.rank, status.iteration]
        if status.rank not in apis:
            there += found[status.rank, None]
        if len(rows) > there:
            text = f"it names {len(rows)} rows of tables, which have {there}"
            yield Damage(Kind.MISSING, each.path, text)
