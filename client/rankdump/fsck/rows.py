"""Tables of figures: their last lines, and whether they have the rows that manifests name."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from rankdump.contract.errors import DamagedError
from rankdump.contract.layout import operator_csv, statistic_csv
from rankdump.contract.layout.api_info import parse
from rankdump.contract.layout.api_tree import info_files_of
from rankdump.contract.layout.file_name import FileKind, FileName
from rankdump.contract.layout.folders import Names
from rankdump.contract.layout.mindspore_sync import spelt
from rankdump.contract.layout.profile import PROFILES
from rankdump.contract.layout.reading import file_in
from rankdump.contract.manifest import ManifestRecord
from rankdump.fsck.scan import read
from rankdump.fsck.values import Damage, Held, Kind, Seen
from rankdump.reader.elements import element_named, element_of
from rankdump.reader.manifests import Manifested

_Place: TypeAlias = "tuple[int, int | None]"
"""Rank and iteration; no iteration for constants, and where no folder says it."""

_NO_TYPE = element_of(0)
"""What tables of CANN say of a type that CANN has not."""


class _Row(NamedTuple):
    """What a row says of its tensor, beside the figures."""

    member: str
    name: str | None
    """None where the name of its table says it."""
    dtype: str
    shape: tuple[int, ...]


_Rows: TypeAlias = "dict[int, list[_Row]]"
"""By time stamp."""


def check_rows(
    root: Path, everything: Iterable[Seen], manifests: Iterable[Held]
) -> Iterator[Damage]:
    """Yield tables that are cut or cannot be read, and iterations of which rows are missing."""
    held = list(manifests)
    known = Manifested(each.manifest for each in held)
    lines: Counter[_Place] = Counter()
    apis: set[int] = set()
    tables: defaultdict[_Place, list[Seen]] = defaultdict(list)
    for seen in everything:
        folder = seen.folder
        if folder is None or not seen.regular or not _is_table(seen):
            continue
        try:
            if folder.names is Names.API_TABLES:
                apis.add(folder.rank)
                lines.update((folder.rank, step) for step in _steps(root, seen))
            else:
                _text(root, seen)
                place = known.rank_of(folder), None if folder.constant else folder.iteration
                tables[place].append(seen)
        except DamagedError as error:
            yield Damage(Kind.TORN, seen.path, str(error))
    for each in held:
        status, records = each.manifest.status, each.manifest.records
        # Every tensor of an api dump has a line; of others those that have nothing else.
        rows = [r for r in records if status.rank in apis or not r.path]
        there = lines[status.rank, status.iteration]
        if rows and status.rank not in apis:
            places = (status.rank, status.iteration), (status.rank, None)
            damages: list[Damage] = []
            found = _rows(root, [seen for place in places for seen in tables[place]], damages)
            yield from damages
            there = sum(_is_there(row, found) for row in rows)
        if len(rows) > there:
            text = f"it names {len(rows)} rows of tables, which have {there}"
            yield Damage(Kind.MISSING, each.path, text)


def _is_table(seen: Seen) -> bool:
    folder = seen.folder
    if folder is None or folder.names is Names.NONE:
        return False
    if folder.names is Names.API_TABLES:
        return info_files_of(seen.name) is not None
    return statistic_csv.TABLE.fullmatch(seen.name) is not None or _operator(seen) is not None


def _operator(seen: Seen) -> FileName | None:
    """Return whose table it is; None for that of a whole folder."""
    says = file_in(seen.folder, seen.full) if seen.folder is not None else None
    return says if says is not None and says.kind is FileKind.TABLE else None


def _text(root: Path, seen: Seen) -> str:
    data = bytes(read(root, seen.path))
    if data and not data.endswith(b"\n"):
        raise DamagedError("its last line has no end")
    return data.decode("utf-8", "backslashreplace")


def _steps(root: Path, seen: Seen) -> list[int]:
    lines = enumerate(_text(root, seen).split("\n"), start=1)
    return [parse(line, file=f"line {number}").step for number, line in lines if line.strip()]


def _rows(root: Path, tables: Sequence[Seen], damages: list[Damage]) -> _Rows:
    """Return the rows of some tables; each that cannot be read as one is a damage."""
    found: defaultdict[int, list[_Row]] = defaultdict(list)
    for seen in tables:
        operator = _operator(seen)
        try:
            text = _text(root, seen).replace("\r\n", "\n")
            if operator is not None:
                for of in operator_csv.parse(text, file=seen.name):
                    row = _Row(f"{of.side.value}.{of.slot}", None, of.data_type, of.shape)
                    found[operator.timestamp_us].append(row)
            elif text:
                for each in statistic_csv.parse(text, file=seen.name):
                    member = f"{each.side.value}.{each.slot}"
                    row = _Row(member, each.op_name, each.dtype, each.shape)
                    found[each.timestamp_us].append(row)
        except DamagedError as error:
            damages.append(Damage(Kind.TORN, seen.path, str(error)))
    return found


def _is_there(record: ManifestRecord, found: _Rows) -> bool:
    """Return whether a row says of a tensor what its manifest does."""
    return any(
        record.member in ("", row.member)
        and record.shape == row.shape
        and (record.dtype in (row.dtype, kind := element_named(row.dtype)) or kind == _NO_TYPE)
        and (row.name is None or row.name in _spellings(record))
        for row in found.get(record.timestamp_us, ())
    )


def _spellings(record: ManifestRecord) -> set[str]:
    """Return how tables may spell the name of an operator."""
    of_profiles = (spelt(record.op_type, record.op_name, each) for each in PROFILES.values())
    return {record.op_name, *map(statistic_csv.field, of_profiles)}
