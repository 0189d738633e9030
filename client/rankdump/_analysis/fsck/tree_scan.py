"""Scan of the folders of a tree, including hidden names, and comparison of what it finds with the
manifests: which files to read, and which are missing, foreign, duplicate, left over or not in a
manifest. Follows no link.
"""

from __future__ import annotations

import os
import re
import stat
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rankdump._analysis.fsck.damage import (
    DamageKind,
    FileCheck,
    FileDamage,
    StoredManifest,
    TreeItem,
)
from rankdump._analysis.reader.coordinator_files import find_order_damage
from rankdump._analysis.reader.file_errors import named_errors
from rankdump._analysis.reader.manifests import TreeManifests
from rankdump._analysis.reader.tree_files import ARGUMENTS_FILE_NAME, TensorFile, read_long_names
from rankdump._core.execution_order import GLOBAL_ORDER_FOLDER, parse_order_file_name
from rankdump._core.manifest import ManifestRecord
from rankdump._core.tree_root import READ_FLAGS
from rankdump._layout import statistic_tables
from rankdump._layout.api_tree import API_FRAMEWORKS
from rankdump._layout.dump_folders import (
    RANK_FOLDER_PATTERN,
    ROOT_FOLDER,
    DumpFolder,
    NameScheme,
    enter_folder,
    find_absent_names,
    parse_name_in_folder,
)
from rankdump._layout.file_name import PACKED_SUFFIX, FileKind, LongFileNames
from rankdump._layout.tree_paths import (
    EXECUTION_ORDER_FOLDER,
    GRAPH_FOLDER,
    MAPPING_FILE,
    METADATA_FOLDER,
)
from rankdump.errors import CorruptedError

_METADATA_FOLDERS = (METADATA_FOLDER, EXECUTION_ORDER_FOLDER, GRAPH_FOLDER)
"""Folders of a rank that contain no tensors."""

NPY_FILE_NAME = re.compile(r".*\.npy(?:\.zst)?", re.S)
LEFTOVER_FILE_NAME = re.compile(r"\..+\.tmp", re.S)
"""Pattern for the name of a file while it is being written."""
_API_TABLE_NAME = re.compile(
    rf"({'|'.join(API_FRAMEWORKS)})_api_dump_(info\.(pkl|csv)|stack\.json)"
)
_ManifestAndRecord = tuple[StoredManifest, ManifestRecord]


def scan_tree(root: Path) -> list[TreeItem]:
    """Return the entries in the folders of a tree, sorted by name.

    Entries of the root itself are included only if they may belong to a dump. CorruptedError when a
    folder cannot be read.
    """
    return list(_scan_folder(root, "", ROOT_FOLDER))


def check_long_names(root: Path, everything: Sequence[TreeItem]) -> Iterator[FileDamage]:
    """Yield damage for files that mapping tables of long names list and that do not exist.

    Only for trees without manifests, because a dropped tensor has a row in the mapping table, too.
    """
    folders: defaultdict[str, set[str]] = defaultdict(set)
    for seen in everything:
        folders[seen.folder_path].add(seen.name)
    for seen in everything:
        folder = seen.folder if seen.name == MAPPING_FILE and seen.is_regular else None
        if folder is not None and folder.names is not NameScheme.NONE:
            names = read_long_names(root / seen.path)
            for name in find_absent_names(folder, names, folders[seen.folder_path]):
                text = f"{seen.path} names it, but it does not exist"
                yield FileDamage(DamageKind.MISSING, f"{seen.folder_path}/{name}", text)


def check_orders(root: Path, everything: Iterable[TreeItem]) -> Iterator[FileDamage]:
    """Yield damage for files of the merged execution order that have lost their
    beginning or end.
    """
    for seen in everything:
        is_order = seen.is_regular and parse_order_file_name(seen.name) is not None
        if is_order and seen.folder_path == GLOBAL_ORDER_FOLDER:
            try:
                why = find_order_damage(root / seen.path)
            except CorruptedError as error:
                why = str(error)
            if why:
                yield FileDamage(DamageKind.TORN, seen.path, why)


def read_regular_file(root: Path, path: str) -> memoryview:
    """Return the bytes of a regular file; CorruptedError for other entries and for read errors."""
    try:
        opened = os.open(root / path, READ_FLAGS)
        try:
            if not stat.S_ISREG(os.fstat(opened).st_mode):
                raise CorruptedError("not a regular file")
            with os.fdopen(opened, "rb", buffering=0, closefd=False) as file:
                return memoryview(file.readall())
        finally:
            os.close(opened)
    except OSError as error:
        raise CorruptedError(f"cannot be read: {error.strerror}") from None


def _scan_folder(root: Path, where: str, folder: DumpFolder | None) -> Iterator[TreeItem]:
    with named_errors(root / where), os.scandir(root / where) as found:
        listed = sorted(found, key=lambda each: each.name)
    names = _read_folder_names(root, where, folder, listed)
    for item in listed:
        path = f"{where}/{item.name}" if where else item.name
        known, below = _enter_folder(where, folder, item.name)
        if not where and not known:
            continue
        if known and item.is_dir(follow_symlinks=False):
            yield from _scan_folder(root, path, below)
            continue
        seen = _tree_item(path, item, folder, names)
        if seen is not None:
            yield seen


def _enter_folder(
    where: str, folder: DumpFolder | None, name: str
) -> tuple[bool, DumpFolder | None]:
    """Decide whether a folder with this name belongs to a tree; also return its dump folder if it
    contains tensors.
    """
    if not where and name == GLOBAL_ORDER_FOLDER:
        return True, None
    if folder is None:  # folders of metadata may contain folders with any name
        return not name.startswith("."), None
    if RANK_FOLDER_PATTERN.fullmatch(where) and name in _METADATA_FOLDERS:
        return True, None
    below = enter_folder(folder, name)
    return below is not None, below


def _tree_item(
    path: str, item: os.DirEntry[str], folder: DumpFolder | None, names: LongFileNames
) -> TreeItem | None:
    try:
        facts = item.stat(follow_symlinks=False)
    except FileNotFoundError:  # the folder was removed after it was listed
        return None
    return TreeItem(
        path=path,
        is_regular=stat.S_ISREG(facts.st_mode),
        is_link=stat.S_ISLNK(facts.st_mode),
        size_bytes=facts.st_size,
        inode=(facts.st_dev, facts.st_ino),
        folder=folder,
        full_name=names.get_full_name(item.name),
    )


def _read_folder_names(
    root: Path, where: str, folder: DumpFolder | None, listed: list[os.DirEntry[str]]
) -> LongFileNames:
    mapping = next((item for item in listed if item.name == MAPPING_FILE), None)
    if folder is None or folder.names is NameScheme.NONE or mapping is None:
        return LongFileNames()
    is_file = mapping.is_file(follow_symlinks=False)
    return read_long_names(root / where / MAPPING_FILE) if is_file else LongFileNames()


def plan_file_checks(
    manifests: Iterable[StoredManifest], seen: dict[str, TreeItem], damages: list[FileDamage]
) -> list[FileCheck]:
    """Return the files that manifests name, with hard links once; add a damage for each missing
    file.
    """
    named: defaultdict[str, list[_ManifestAndRecord]] = defaultdict(list)
    for held in manifests:
        for record in held.manifest.records:
            if record.path and not record.same_as:
                named[record.path].append((held, record))
    found: dict[object, FileCheck] = {}
    for path, holders in named.items():
        file = seen.get(path)
        if file is None:
            text = f"{holders[0][0].path} names it, but it does not exist"
            damages.append(FileDamage(DamageKind.MISSING, path, text))
        elif file.is_regular:
            job = _plan_file_check(path, file, holders)
            # The header of a bin file contains the name of its operator; an npy file contains no
            # name.
            is_named = NPY_FILE_NAME.fullmatch(path) is None
            due = tuple(
                (each.dtype, each.shape, each.digest, is_named and (each.member, each.op_name))
                for each in job.records
            )
            same = file.inode, job.agent_wrote, path.endswith(PACKED_SUFFIX), due
            known = found.get(same)
            if known is not None:
                stored = max(known.stored_bytes, job.stored_bytes)
                job = replace(known, paths=known.paths + job.paths, stored_bytes=stored)
            found[same] = job
    return list(found.values())


def _plan_file_check(path: str, file: TreeItem, holders: list[_ManifestAndRecord]) -> FileCheck:
    # A tensor that was sent again in another session has the same name, so its last record counts.
    by_member = {record.member: (held, record) for held, record in holders}
    records = tuple(record for _, record in by_member.values())
    ours = all(held.manifest.session is not None for held, _ in by_member.values())
    stored = sum(record.bytes_stored for record in records)
    return FileCheck((path,), records, stored, file.size_bytes, ours)


def check_unlisted_files(
    everything: Iterable[TreeItem],
    manifests: Iterable[StoredManifest],
    hidden: Iterable[StoredManifest],
    gone: Collection[tuple[int, int]],
) -> Iterator[FileDamage]:
    """Yield damage for entries that no manifest names, except for files that a dump usually has
    besides.

    Files that a hidden manifest names are being removed; `gone` contains the retired ranks and
    iterations.
    """
    held = list(manifests)
    known = TreeManifests(each.manifest for each in held)
    going = {record.path for each in hidden for record in each.manifest.records}
    files: list[TensorFile] = []
    for seen in everything:
        if seen.is_link or not seen.is_regular:
            text = "a link, which was not followed" if seen.is_link else "not a regular file"
            yield FileDamage(DamageKind.FOREIGN, seen.path, text)
        elif LEFTOVER_FILE_NAME.fullmatch(seen.name):
            yield FileDamage(DamageKind.LEFTOVER, seen.path, "a half-written file", mendable=True)
        elif held and seen.folder is not None:
            file = _tensor_file(seen, seen.folder)
            if file is not None and (known.records_of(file.relative) or file.relative not in going):
                files.append(file)
            elif file is not None:
                continue
            elif not _is_usual_file(seen, seen.folder):
                yield FileDamage(DamageKind.FOREIGN, seen.path, "not a file name of a dump")
    yield from _check_unlisted_tensors(files, held, known, gone)


def _tensor_file(seen: TreeItem, folder: DumpFolder) -> TensorFile | None:
    name = parse_name_in_folder(folder, seen.full_name)
    if name is None or not name.kind.holds_tensors:
        return None
    return TensorFile(folder, seen.path, name, seen.size_bytes, seen.full_name)


def _is_usual_file(seen: TreeItem, folder: DumpFolder) -> bool:
    if folder.names is NameScheme.NONE:
        return False
    if folder.names is NameScheme.API_TABLES:
        return _API_TABLE_NAME.fullmatch(seen.name) is not None
    usual = seen.name == MAPPING_FILE or statistic_tables.STATISTIC_TABLE_NAME.fullmatch(seen.name)
    return (
        bool(usual or ARGUMENTS_FILE_NAME.fullmatch(seen.name))
        or parse_name_in_folder(folder, seen.full_name) is not None
    )


def _check_unlisted_tensors(
    files: list[TensorFile],
    held: list[StoredManifest],
    known: TreeManifests,
    gone: Collection[tuple[int, int]],
) -> Iterator[FileDamage]:
    """Yield damage for tensor files that no manifest names: duplicate files, and files without a
    manifest.
    """
    there = {file.relative for file in files}
    wholes = {file.operator: file for file in files if file.file_name.kind is FileKind.OPERATOR}
    complete = {(each.manifest.status.rank, each.manifest.status.iteration) for each in held}
    unended: defaultdict[tuple[int, int, str], int] = defaultdict(int)
    for file in files:
        if known.records_of(file.relative):
            continue
        twin = file.relative.removesuffix(PACKED_SUFFIX)
        twin = twin if twin != file.relative else file.relative + PACKED_SUFFIX
        whole = wholes.get(file.operator) if file.file_name.kind is FileKind.MEMBER else None
        member = f"{file.file_name.side.value}.{file.file_name.slot}"
        at = file.file_name.number if file.folder.iteration is None else file.folder.iteration
        rank = known.rank_of(file.folder)
        if whole is not None and member in known.records_of(whole.relative):
            text = f"{whole.relative} contains the same tensor"
            yield FileDamage(DamageKind.DUPLICATE, file.relative, text, mendable=True)
        elif twin in there and known.records_of(twin):
            yield FileDamage(
                DamageKind.DUPLICATE, file.relative, f"the manifest names {twin} instead"
            )
        elif at is not None and (rank, at) not in complete:
            unended[rank, at, file.folder_path] += 1
        else:
            yield FileDamage(DamageKind.UNMANIFESTED, file.relative, "no manifest names it")
    for (rank, iteration, where), count in sorted(unended.items()):
        how = "is retired" if (rank, iteration) in gone else "has no manifest"
        text = f"rank {rank}, iteration {iteration} {how}; {count} of its files remain"
        yield FileDamage(DamageKind.UNMANIFESTED, where, text)
