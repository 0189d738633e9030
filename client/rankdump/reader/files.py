"""Files of a tree to its tensors, with what manifests and headers say of each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from rankdump.contract.errors import DamagedError
from rankdump.contract.key import Side, TensorKey
from rankdump.contract.layout.file_name import NUMBER, PACKED, FileKind, FileName
from rankdump.contract.layout.folders import Folder, Names
from rankdump.contract.layout.reading import key_in
from rankdump.reader.api_rows import Placed
from rankdump.reader.bins import described
from rankdump.reader.entry import Described, Entry
from rankdump.reader.manifests import Manifested, Said

_MEMBER = re.compile(rf"(input|output)\.({NUMBER})")


class File(NamedTuple):
    """One file that holds tensors."""

    folder: Folder
    relative: str
    """Path below the root."""
    says: FileName
    """What the name says, the full one of a long name."""
    stored_bytes: int
    full: str = ""
    """The full name of a long one, else the name."""

    @property
    def where(self) -> str:
        """Path of the folder below the root."""
        return self.relative.rpartition("/")[0]

    @property
    def operator(self) -> tuple[str, FileName]:
        """The operator it belongs to: the same for its whole file and for those of one tensor."""
        says = self.says._replace(kind=FileKind.OPERATOR, side=Side.INPUT, slot=0)
        return self.where, says


def entries_of(
    root: Path, files: Iterable[File], known: Manifested, problems: list[str], *, stepped: bool
) -> list[Entry]:
    """Return the tensors of files, each once; what cannot be read is a problem.

    Tensors of an operator may stand in its file and in files of their own, where whoever joined
    them was interrupted: the joined ones count. With `stepped`, info files have real steps.
    """
    entries: list[Entry] = []
    bins: list[File] = []
    placed = Placed(root, stepped=stepped)
    for file in files:
        if file.folder.names is Names.API:
            entries.append(_of_call(root, file, known, placed))
        elif file.says.kind is FileKind.TENSOR:
            entries.append(_tensor(root, file, known))
        else:
            bins.append(file)
    seen: set[tuple[tuple[str, FileName], str]] = set()
    for file in sorted(bins, key=lambda file: file.says.kind is FileKind.MEMBER):
        try:
            members = list(_members(root, file, known))
        except DamagedError as error:
            problems.append(str(error))
            continue
        operator = file.operator
        for entry in members:
            once = operator, entry.member
            if once not in seen:
                seen.add(once)
                entries.append(entry)
    return entries


def _tensor(root: Path, file: File, known: Manifested) -> Entry:
    every, says = known.of(file.relative), file.says
    # Its record has a member where it shares the time of its operator's others.
    said = every.get("") or every.get(f"{says.side.value}.{says.slot}")
    key = _key(file, says.side, says.slot, known, said)
    return Entry(root, file.relative, key, file.stored_bytes, said[1] if said else None)


def _of_call(root: Path, file: File, known: Manifested, placed: Placed) -> Entry:
    """Return the tensor of a file whose name says no time: a manifest does, or the info file."""
    said, key = known.of(file.relative).get(""), _key(file, file.says.side, file.says.slot, known)
    if said is not None:
        iteration, when = said[0].iteration, said[1].timestamp_us
    else:
        iteration, when = placed.of(file.where, file.full)
    key = key._replace(iteration=iteration, timestamp_us=when)
    return Entry(root, file.relative, key, file.stored_bytes, said[1] if said else None)


def _members(root: Path, file: File, known: Manifested) -> Iterator[Entry]:
    said = known.of(file.relative)
    if said:
        for member, each in said.items():
            side, slot = _side_and_slot(file, member)
            key = _key(file, side, slot, known, each)
            taken = each[1].bytes_stored
            yield Entry(root, file.relative, key, taken, each[1], f"{side.value}.{slot}")
        return
    tensors = list(described(root / file.relative))
    shares = _shares(file, [facts for _, _, facts in tensors])
    for (side, slot, facts), share in zip(tensors, shares, strict=True):
        key = _key(file, side, slot, known, None)
        member = f"{side.value}.{slot}"
        yield Entry(root, file.relative, key, share, member=member, described=facts)


def _side_and_slot(file: File, member: str) -> tuple[Side, int]:
    if file.says.kind is FileKind.MEMBER:
        return file.says.side, file.says.slot
    found = _MEMBER.fullmatch(member)
    if found is None:
        raise DamagedError(f"{file.relative}: its manifest names {member[:60]!r} as a part of it")
    return Side(found[1]), int(found[2])


def _shares(file: File, tensors: list[Described]) -> list[int]:
    """Return how much of the file's size each tensor has; the first has the header's, too."""
    sizes = [facts.data_bytes for facts in tensors]
    packed = file.relative.endswith(PACKED)
    rest = [0] * len(sizes[1:]) if packed else sizes[1:]
    return [file.stored_bytes - sum(rest), *rest][: len(sizes)]


def _key(
    file: File, side: Side, slot: int, known: Manifested, said: Said | None = None
) -> TensorKey:
    folder, says = file.folder, file.says
    if not folder.device:
        return key_in(folder, says, side, slot)
    if said is None:
        return key_in(folder, says, side, slot, rank=known.rank_of(folder))
    status = said[0]
    return key_in(folder, says, side, slot, rank=status.rank, iteration=status.iteration)
