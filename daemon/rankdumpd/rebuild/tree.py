"""The manifests of a tree, and which programs it has: read without following any link."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from rankdump.contract.errors import DamagedError
from rankdump.contract.layout.folders import RANK_FOLDER
from rankdump.contract.layout.mindspore_sync import (
    MANIFEST_FOLDER,
    METADATA_FOLDER,
    ORDER_FOLDER,
)
from rankdump.contract.manifest import Manifest, intact
from rankdump.contract.retired import RETIRED_FILE, Retired

_ORDER = re.compile(r"ms_execution_order_graph_([0-9]{1,9})\.csv")
_MOST_BYTES = 1 << 30
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def manifests_of(root: Path, *, hidden: bool = False) -> Iterator[tuple[str, Manifest]]:
    """Yield the manifests of all ranks with the folder of their rank; or those that are `hidden`,
    of iterations that are being removed.

    DamagedError names one that cannot be read: a ledger without it would be a wrong one.
    """
    for rank in _ranks(root):
        folder = f"{rank}/{MANIFEST_FOLDER}"
        for name in _names(root, folder):
            if name.endswith(".json") and name.startswith(".") == hidden:
                yield rank, _manifest(root, f"{folder}/{name}")


def retired_of(root: Path) -> Iterator[tuple[str, Retired]]:
    """Yield what was removed of all ranks with the folder of their rank; DamagedError as above."""
    for rank in _ranks(root):
        if RETIRED_FILE not in _names(root, f"{rank}/{METADATA_FOLDER}"):
            continue
        path = f"{rank}/{METADATA_FOLDER}/{RETIRED_FILE}"
        try:
            # Behind the last end of a line is nothing, or what a crash left of one.
            for line in _bytes(root, path).decode(errors="replace").split("\n")[:-1]:
                yield rank, Retired.from_line(line)
        except DamagedError as error:
            raise DamagedError(f"{root / path}: {error}") from None


def ordered_graphs(root: Path, rank: str) -> list[int]:
    """Return the graphs whose program order is written in the folder of a rank."""
    found = map(_ORDER.fullmatch, _names(root, f"{rank}/{ORDER_FOLDER}"))
    return [int(each[1]) for each in found if each]


def _ranks(root: Path) -> list[str]:
    return list(filter(RANK_FOLDER.fullmatch, _names(root, "")))


def _names(root: Path, folder: str) -> list[str]:
    """Return what a folder holds; nothing where there is none, or a link is on the way."""
    path = root
    for part in folder.split("/") if folder else ():
        path = path / part
        if path.is_symlink():
            return []
    try:
        return sorted(each.name for each in path.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DamagedError(f"{path}: cannot be read: {error.strerror}") from None


def _bytes(root: Path, path: str) -> bytes:
    try:
        with os.fdopen(os.open(root / path, _READ), "rb") as file:
            return file.read(_MOST_BYTES)
    except OSError as error:
        raise DamagedError(f"cannot be read: {error.strerror}") from None


def _manifest(root: Path, path: str) -> Manifest:
    try:
        data = _bytes(root, path)
        if not intact(data):
            raise DamagedError("its checksum is not that of its bytes")
        return Manifest.from_json(data)
    except DamagedError as error:
        raise DamagedError(f"{root / path}: {error}") from None
