"""What stands in a tree and what manifests say, to files to be read and to damages. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator

from rankdump.contract.layout import statistic_csv
from rankdump.contract.layout.api_tree import FRAMEWORKS
from rankdump.contract.layout.file_name import PACKED, FileKind
from rankdump.contract.layout.folders import Folder, Names
from rankdump.contract.layout.place import MAPPING_FILE
from rankdump.contract.layout.reading import file_in
from rankdump.contract.manifest import ManifestRecord
from rankdump.fsck.values import Damage, Held, Job, Kind, Seen
from rankdump.reader.files import File
from rankdump.reader.manifests import Manifested

NPY = re.compile(r".*\.npy(?:\.zst)?", re.S)
LEFTOVER = re.compile(r"\..+\.tmp", re.S)
"""What a file is called while it grows."""
_ARGUMENTS = re.compile(r"[^.]+\..+\.json")
_API_TABLES = re.compile(rf"({'|'.join(FRAMEWORKS)})_api_dump_(info\.(pkl|csv)|stack\.json)")
_Said = tuple[Held, ManifestRecord]


def jobs_of(manifests: Iterable[Held], seen: dict[str, Seen], damages: list[Damage]) -> list[Job]:
    """Return the files that manifests name, those with the same bytes once; missing is a damage."""
    named: defaultdict[str, list[_Said]] = defaultdict(list)
    for held in manifests:
        for record in held.manifest.records:
            if record.path:
                named[record.path].append((held, record))
    found: dict[object, Job] = {}
    for path, said in named.items():
        file = seen.get(path)
        if file is None:
            text = f"{said[0][0].path} names it, and it is not there"
            damages.append(Damage(Kind.MISSING, path, text))
        elif file.regular:
            job = _job(path, file, said)
            # Only the header of a bin file says which operator it is of.
            named_in = NPY.fullmatch(path) is None
            due = tuple(_due(record, named_in=named_in) for record in job.records)
            same = file.inode, job.ours, path.endswith(PACKED), due
            known = found.get(same)
            found[same] = job if known is None else _both(known, job)
    return list(found.values())


def _job(path: str, file: Seen, said: list[_Said]) -> Job:
    # Sent again in another session, a tensor has its old name: the newest word counts.
    by_member = {record.member: (held, record) for held, record in said}
    records = tuple(record for _, record in by_member.values())
    ours = all(held.manifest.session is not None for held, _ in by_member.values())
    stored = sum(record.bytes_stored for record in records)
    return Job((path,), records, stored, file.size_bytes, ours)


def _due(record: ManifestRecord, *, named_in: bool) -> object:
    of = (record.member, record.op_name) if named_in else ()
    return record.dtype, record.shape, record.digest, of


def _both(job: Job, other: Job) -> Job:
    stored = max(job.stored_bytes, other.stored_bytes)
    return Job((*job.paths, *other.paths), job.records, stored, job.size_bytes, job.ours)


def around(
    everything: Iterable[Seen],
    manifests: Iterable[Held],
    hidden: Iterable[Held] = (),
    gone: Collection[tuple[int, int]] = (),
) -> Iterator[Damage]:
    """Yield what no manifest names and should not be there, or not so.

    Files that a hidden manifest names are being removed; `gone` are ranks with iterations that
    were retired.
    """
    held = list(manifests)
    known = Manifested(each.manifest for each in held)
    going = {record.path for each in hidden for record in each.manifest.records}
    files: list[File] = []
    for seen in everything:
        if seen.link or not seen.regular:
            text = "a link, which was not followed" if seen.link else "no regular file"
            yield Damage(Kind.FOREIGN, seen.path, text)
        elif LEFTOVER.fullmatch(seen.name):
            yield Damage(Kind.LEFTOVER, seen.path, "half-written", mendable=True)
        elif held and seen.folder is not None:
            file = _tensor_file(seen, seen.folder)
            if file is not None and (known.of(file.relative) or file.relative not in going):
                files.append(file)
            elif file is not None:
                continue
            elif not _belongs(seen, seen.folder):
                yield Damage(Kind.FOREIGN, seen.path, "no file of a dump is called so")
    yield from _strays(files, held, known, gone)


def _tensor_file(seen: Seen, folder: Folder) -> File | None:
    says = file_in(folder, seen.full)
    if says is None or not says.kind.holds_tensors:
        return None
    return File(folder, seen.path, says, seen.size_bytes, seen.full)


def _belongs(seen: Seen, folder: Folder) -> bool:
    if folder.names is Names.NONE:
        return False
    if folder.names is Names.API_TABLES:
        return _API_TABLES.fullmatch(seen.name) is not None
    usual = seen.name == MAPPING_FILE or statistic_csv.TABLE.fullmatch(seen.name)
    return bool(usual or _ARGUMENTS.fullmatch(seen.name)) or file_in(folder, seen.full) is not None


def _strays(
    files: list[File], held: list[Held], known: Manifested, gone: Collection[tuple[int, int]]
) -> Iterator[Damage]:
    """Yield the tensors that no manifest names: copies of others, or nobody's."""
    there = {file.relative for file in files}
    wholes = {file.operator: file for file in files if file.says.kind is FileKind.OPERATOR}
    complete = {(each.manifest.status.rank, each.manifest.status.iteration) for each in held}
    unended: defaultdict[tuple[int, int, str], int] = defaultdict(int)
    for file in files:
        if known.of(file.relative):
            continue
        twin = file.relative.removesuffix(PACKED)
        twin = twin if twin != file.relative else file.relative + PACKED
        whole = wholes.get(file.operator) if file.says.kind is FileKind.MEMBER else None
        member = f"{file.says.side.value}.{file.says.slot}"
        place = known.rank_of(file.folder), _iteration(file)
        if whole is not None and member in known.of(whole.relative):
            text = f"{whole.relative} holds it already"
            yield Damage(Kind.DUPLICATE, file.relative, text, mendable=True)
        elif twin in there and known.of(twin):
            yield Damage(Kind.DUPLICATE, file.relative, f"{twin} is the one that was dumped")
        elif place[1] is not None and place not in complete:
            unended[(place[0], place[1], file.where)] += 1
        else:
            yield Damage(Kind.UNMANIFESTED, file.relative, "no manifest names it")
    for (rank, iteration, where), count in sorted(unended.items()):
        how = "is retired" if (rank, iteration) in gone else "has no manifest"
        text = f"rank {rank}, iteration {iteration} {how}; {count} of its files are here"
        yield Damage(Kind.UNMANIFESTED, where, text)


def _iteration(file: File) -> int | None:
    return file.says.number if file.folder.iteration is None else file.folder.iteration
