"""The manifests of a tree, read strictly: whole, under their own names, and adding up."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from rankdump.contract.errors import DamagedError
from rankdump.contract.layout.folders import RANK_FOLDER
from rankdump.contract.layout.mindspore_sync import MANIFEST_FOLDER, METADATA_FOLDER
from rankdump.contract.manifest import Manifest, intact, manifest_name
from rankdump.contract.retired import RETIRED_FILE, Retired
from rankdump.fsck.scan import read
from rankdump.fsck.values import Damage, Held, Kind, Seen

_FOLDER = re.compile(rf"({RANK_FOLDER.pattern})/{re.escape(MANIFEST_FOLDER)}")
_RETIRED = re.compile(rf"({RANK_FOLDER.pattern})/{re.escape(f'{METADATA_FOLDER}/{RETIRED_FILE}')}")


def is_manifest(seen: Seen) -> bool:
    """Return whether something stands where manifests do, and is called like one."""
    place = _FOLDER.fullmatch(seen.where) is not None
    return place and seen.regular and seen.name.endswith(".json")


def held_manifests(
    root: Path, everything: Iterable[Seen], damages: list[Damage]
) -> tuple[list[Held], list[Held]]:
    """Return the manifests of a tree, and those that were hidden before their removal.

    Each that is no whole one, or does not add up, is a damage.
    """
    found: list[Held] = []
    hidden: list[Held] = []
    for seen in filter(is_manifest, everything):
        try:
            held = _held(root, seen)
        except DamagedError as error:
            damages.append(Damage(Kind.MANIFEST, seen.path, str(error)))
            continue
        (hidden if seen.name.startswith(".") else found).append(held)
    for held in _named(found, damages):
        damages.extend(_unbalanced(held))
    return found, hidden


def retired_places(
    root: Path, everything: Iterable[Seen], damages: list[Damage]
) -> set[tuple[int, int]]:
    """Return ranks with iterations that were removed; a line that cannot be read is a damage."""
    found: set[tuple[int, int]] = set()
    for seen in everything:
        if not seen.regular or not _RETIRED.fullmatch(seen.path):
            continue
        try:
            lines = bytes(read(root, seen.path)).decode(errors="replace").split("\n")
            # Behind the last end of a line is nothing, or a line that is being written.
            found |= {(r.rank, r.iteration) for r in map(Retired.from_line, lines[:-1])}
        except DamagedError as error:
            damages.append(Damage(Kind.TORN, seen.path, str(error)))
    return found


def _held(root: Path, seen: Seen) -> Held:
    data = bytes(read(root, seen.path))
    if not intact(data):
        raise DamagedError("its checksum is not that of its bytes")
    return Held(seen.path, Manifest.from_json(data))


def _named(found: list[Held], damages: list[Damage]) -> Iterator[Held]:
    """Yield the manifests that stand under their own names; any other is a damage."""
    paths = {held.path for held in found}
    for held in found:
        folder = held.path.rpartition("/")[0]
        status = held.manifest.status
        rank = RANK_FOLDER.fullmatch(folder.partition("/")[0])
        due = f"{folder}/{manifest_name(status.iteration, status.session_id)}"
        if rank is None or int(rank[2]) != status.rank:
            text = f"it is of rank {status.rank}"
            damages.append(Damage(Kind.MANIFEST, held.path, text))
        elif held.path == due:
            yield held
        elif due in paths:
            text = f"a second manifest of iteration {status.iteration}, beside {due}"
            damages.append(Damage(Kind.DUPLICATE, held.path, text))
        else:
            damages.append(Damage(Kind.MANIFEST, held.path, f"it should be called {due}"))


def _unbalanced(held: Held) -> Iterator[Damage]:
    status, records = held.manifest.status, held.manifest.records
    if not status.complete:
        yield Damage(Kind.MANIFEST, held.path, "of an iteration that is not complete")
    if not status.balanced:
        text = f"{status.expected} tensors expected, {status.accounted} accounted for"
        yield Damage(Kind.UNBALANCED, held.path, text)
    if len(records) != status.kept:
        text = f"{status.kept} tensors kept, and {len(records)} named"
        yield Damage(Kind.UNBALANCED, held.path, text)
    places = Counter((record.path, record.member) for record in records if record.path)
    for (path, member), count in places.items():
        if count > 1:
            text = f"it names {path} {member}".rstrip() + f" {count} times"
            yield Damage(Kind.DUPLICATE, held.path, text)
