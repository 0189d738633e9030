"""Strict check of manifests, fingerprints and tables of statistics. Manifests must be intact,
balanced and under the right names; fingerprints must have their digests; tables must end with a
complete line and have the rows that manifests name. Reads these files and the lists of retired
iterations, but no tensors.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from rankdump._analysis.fsck.damage import DamageKind, FileDamage, StoredManifest, TreeItem
from rankdump._analysis.fsck.tree_scan import read_regular_file
from rankdump._analysis.reader.fingerprints import check_fingerprint_file, find_fingerprint_path
from rankdump._analysis.reader.manifests import TreeManifests, read_folder_owners
from rankdump._core.cann_types import name_element_type, normalize_element_name
from rankdump._core.manifest import (
    RETIRED_FILE,
    Manifest,
    ManifestRecord,
    RetiredIteration,
    is_intact,
    make_manifest_name,
)
from rankdump._layout.api_files import parse_info_line
from rankdump._layout.api_tree import parse_info_file_name
from rankdump._layout.dump_folders import RANK_FOLDER_PATTERN, NameScheme, parse_name_in_folder
from rankdump._layout.file_name import FileKind, FileName
from rankdump._layout.profile import PROFILES
from rankdump._layout.statistic_tables import (
    STATISTIC_TABLE_NAME,
    StatisticCsvRow,
    clean_table_field,
    parse_operator_table,
    parse_statistic_table,
)
from rankdump._layout.tree_paths import MANIFEST_FOLDER, METADATA_FOLDER, spell_operator
from rankdump.errors import CorruptedError

_MANIFEST_FOLDER_PATH = re.compile(rf"({RANK_FOLDER_PATTERN.pattern})/{re.escape(MANIFEST_FOLDER)}")
_RETIRED_FILE_PATH = re.compile(
    rf"({RANK_FOLDER_PATTERN.pattern})/{re.escape(f'{METADATA_FOLDER}/{RETIRED_FILE}')}"
)

_RankIteration: TypeAlias = "tuple[int, int | None]"
"""Rank and iteration; the iteration is None for constants, and for folders without an iteration."""
_UNKNOWN_TYPE = name_element_type(0)
"""Name that CANN's tables use for an element type that CANN lacks."""
_FoundRow: TypeAlias = "tuple[FileName | None, StatisticCsvRow]"
"""A row of a table; if the table is that of an operator, with this operator."""


def is_manifest(seen: TreeItem) -> bool:
    """Return whether an entry is in the folder for manifests and has the name of one."""
    place = _MANIFEST_FOLDER_PATH.fullmatch(seen.folder_path) is not None
    return place and seen.is_regular and seen.name.endswith(".json")


def read_stored_manifests(
    root: Path, everything: Iterable[TreeItem], damages: list[FileDamage]
) -> tuple[list[StoredManifest], list[StoredManifest]]:
    """Return the manifests of a tree, and the hidden manifests of interrupted removals.

    Adds a damage for each manifest that is not intact or not balanced.
    """
    found: list[StoredManifest] = []
    hidden: list[StoredManifest] = []
    for seen in filter(is_manifest, everything):
        try:
            held = _read_manifest(root, seen)
        except CorruptedError as error:
            damages.append(FileDamage(DamageKind.MANIFEST, seen.path, str(error)))
            continue
        (hidden if seen.name.startswith(".") else found).append(held)
    for held in _check_manifest_names(found, damages):
        damages.extend(_check_balance(held))
    return found, hidden


def read_retired_places(
    root: Path, everything: Iterable[TreeItem], damages: list[FileDamage]
) -> set[tuple[int, int]]:
    """Return the ranks and iterations that were removed; add a damage for an unreadable list."""
    found: set[tuple[int, int]] = set()
    for seen in everything:
        if not seen.is_regular or not _RETIRED_FILE_PATH.fullmatch(seen.path):
            continue
        try:
            lines = bytes(read_regular_file(root, seen.path)).decode(errors="replace").split("\n")
            # The text after the last line end is empty, or a line that is still being written.
            found |= {(r.rank, r.iteration) for r in map(RetiredIteration.from_line, lines[:-1])}
        except CorruptedError as error:
            damages.append(FileDamage(DamageKind.TORN, seen.path, str(error)))
    return found


def _read_manifest(root: Path, seen: TreeItem) -> StoredManifest:
    data = bytes(read_regular_file(root, seen.path))
    if not is_intact(data):
        raise CorruptedError("its checksum does not match its content")
    return StoredManifest(seen.path, Manifest.from_json(data))


def _check_manifest_names(
    found: list[StoredManifest], damages: list[FileDamage]
) -> Iterator[StoredManifest]:
    """Yield the manifests that have the right names; add a damage for each other manifest."""
    paths = {held.path for held in found}
    for held in found:
        folder = held.path.rpartition("/")[0]
        status = held.manifest.status
        rank = RANK_FOLDER_PATTERN.fullmatch(folder.partition("/")[0])
        due = f"{folder}/{make_manifest_name(status.iteration, status.session_id)}"
        if rank is None or int(rank[2]) != status.rank:
            text = f"the manifest belongs to rank {status.rank}"
            damages.append(FileDamage(DamageKind.MANIFEST, held.path, text))
        elif held.path == due:
            yield held
        elif due in paths:
            text = f"a second manifest of iteration {status.iteration}, beside {due}"
            damages.append(FileDamage(DamageKind.DUPLICATE, held.path, text))
        else:
            damages.append(FileDamage(DamageKind.MANIFEST, held.path, f"its name should be {due}"))


def _check_balance(held: StoredManifest) -> Iterator[FileDamage]:
    status, records = held.manifest.status, held.manifest.records
    if not status.complete:
        yield FileDamage(DamageKind.MANIFEST, held.path, "the iteration is not complete")
    if not status.is_balanced:
        text = f"{status.expected} tensors expected, {status.accounted_tensors} accounted for"
        yield FileDamage(DamageKind.UNBALANCED, held.path, text)
    if len(records) != status.kept_tensors:
        text = f"{status.kept_tensors} tensors stored, but {len(records)} named"
        yield FileDamage(DamageKind.UNBALANCED, held.path, text)
    places = Counter((record.path, record.member) for record in records if record.path)
    for (path, member), count in places.items():
        if count > 1:
            text = f"the manifest names {path} {member}".rstrip() + f" {count} times"
            yield FileDamage(DamageKind.DUPLICATE, held.path, text)


def check_fingerprints(
    root: Path, manifests: Iterable[StoredManifest], paths: Collection[str]
) -> Iterator[FileDamage]:
    """Yield damage for fingerprint files that are missing or do not match their manifests.

    `paths` contains the paths of all entries in the tree.
    """
    for held in manifests:
        seal, path = held.manifest.fingerprints, find_fingerprint_path(held.path)
        if seal is None:
            continue
        if path not in paths:
            text = f"{held.path} names it, but it does not exist"
            yield FileDamage(DamageKind.MISSING, path, text)
            continue
        try:
            data = read_regular_file(root, path)
            check_fingerprint_file(data, seal, len(held.manifest.records))
        except CorruptedError as error:
            yield FileDamage(DamageKind.TORN, path, str(error))


def check_tables(
    root: Path, everything: Iterable[TreeItem], manifests: Iterable[StoredManifest]
) -> Iterator[FileDamage]:
    """Yield damage for tables that are incomplete or unreadable, and for manifests whose rows are
    missing.
    """
    held = list(manifests)
    known = TreeManifests((each.manifest for each in held), read_folder_owners(root))
    lines: Counter[_RankIteration] = Counter()
    apis: set[int] = set()
    tables: defaultdict[_RankIteration, list[TreeItem]] = defaultdict(list)
    for seen in everything:
        folder = seen.folder
        if folder is None or not seen.is_regular or not _is_table(seen):
            continue
        try:
            if folder.names is NameScheme.API_TABLES:
                apis.add(folder.rank)
                lines.update((folder.rank, step) for step in _read_steps(root, seen))
            else:
                _read_text(root, seen)
                place = known.rank_of(folder), None if folder.constant else folder.iteration
                tables[place].append(seen)
        except CorruptedError as error:
            yield FileDamage(DamageKind.TORN, seen.path, str(error))
    for each in held:
        status, records = each.manifest.status, each.manifest.records
        # Every tensor of an API dump has a line; in other dumps, every tensor without a file has
        # one.
        rows = [r for r in records if status.rank in apis or not r.path]
        there = lines[status.rank, status.iteration]
        if rows and status.rank not in apis:
            places = (status.rank, status.iteration), (status.rank, None)
            damages: list[FileDamage] = []
            found = _read_rows(root, [seen for place in places for seen in tables[place]], damages)
            yield from damages
            there = sum(_has_row(row, found[row.timestamp_us]) for row in rows)
        if len(rows) > there:
            text = f"the manifest names {len(rows)} rows of tables, but the tables have {there}"
            yield FileDamage(DamageKind.MISSING, each.path, text)


def _is_table(seen: TreeItem) -> bool:
    folder = seen.folder
    if folder is None or folder.names is NameScheme.NONE:
        return False
    if folder.names is NameScheme.API_TABLES:
        return parse_info_file_name(seen.name) is not None
    return (
        STATISTIC_TABLE_NAME.fullmatch(seen.name) is not None
        or _operator_of_table(seen) is not None
    )


def _operator_of_table(seen: TreeItem) -> FileName | None:
    """Return the operator of an operator's table; None for the table of a whole folder."""
    name = parse_name_in_folder(seen.folder, seen.full_name) if seen.folder is not None else None
    return name if name is not None and name.kind is FileKind.TABLE else None


def _read_text(root: Path, seen: TreeItem) -> str:
    data = bytes(read_regular_file(root, seen.path))
    if data and not data.endswith(b"\n"):
        raise CorruptedError("its last line is incomplete")
    return data.decode("utf-8", "backslashreplace")


def _read_steps(root: Path, seen: TreeItem) -> list[int]:
    lines = enumerate(_read_text(root, seen).split("\n"), start=1)
    return [
        parse_info_line(line, file=f"line {number}").step for number, line in lines if line.strip()
    ]


def _read_rows(
    root: Path, tables: Sequence[TreeItem], damages: list[FileDamage]
) -> defaultdict[int, list[_FoundRow]]:
    """Return the rows of tables by time stamp; add a damage for each unreadable table."""
    found: defaultdict[int, list[_FoundRow]] = defaultdict(list)
    for seen in tables:
        operator, rows = _operator_of_table(seen), list[StatisticCsvRow]()
        try:
            text = _read_text(root, seen).replace("\r\n", "\n")
            if operator is not None:
                rows = parse_operator_table(text, operator, file=seen.name)
            elif text:
                rows = parse_statistic_table(text, file=seen.name)
        except CorruptedError as error:
            damages.append(FileDamage(DamageKind.TORN, seen.path, str(error)))
        for row in rows:
            found[row.timestamp_us].append((operator, row))
    return found


def _has_row(record: ManifestRecord, found: Iterable[_FoundRow]) -> bool:
    """Return whether a row with the same time stamp matches a record of a manifest."""
    return any(
        record.member in ("", f"{row.side.value}.{row.slot}")
        and record.shape == row.shape
        and (
            record.dtype in (row.dtype, kind := normalize_element_name(row.dtype))
            or kind == _UNKNOWN_TYPE
        )
        and (operator is not None or row.op_name in _name_spellings(record))
        for operator, row in found
    )


def _name_spellings(record: ManifestRecord) -> set[str]:
    """Return the spellings that an operator's name may have in tables."""
    of_profiles = (
        spell_operator(record.op_type, record.op_name, each) for each in PROFILES.values()
    )
    return {record.op_name, *map(clean_table_field, of_profiles)}
