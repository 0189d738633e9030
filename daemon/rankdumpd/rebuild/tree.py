"""The manifests of a tree, and which programs it has: read without following any link."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from rankdump.contract.errors import DamagedError
from rankdump.contract.layout.folders import RANK_FOLDER
from rankdump.contract.layout.mindspore_sync import MANIFEST_FOLDER, ORDER_FOLDER
from rankdump.contract.manifest import Manifest, intact

_ORDER = re.compile(r"ms_execution_order_graph_([0-9]{1,9})\.csv")
_MOST_BYTES = 1 << 30
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def manifests_of(root: Path) -> Iterator[tuple[str, Manifest]]:
    """Yield the manifests of all ranks with the folder of their rank.

    DamagedError names one that cannot be read: a ledger without it would be a wrong one.
    """
    for rank in _names(root, ""):
        if RANK_FOLDER.fullmatch(rank):
            folder = f"{rank}/{MANIFEST_FOLDER}"
            for name in _names(root, folder):
                if name.endswith(".json") and not name.startswith("."):
                    yield rank, _manifest(root, f"{folder}/{name}")


def ordered_graphs(root: Path, rank: str) -> list[int]:
    """Return the graphs whose program order is written in the folder of a rank."""
    found = map(_ORDER.fullmatch, _names(root, f"{rank}/{ORDER_FOLDER}"))
    return [int(each[1]) for each in found if each]


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


def _manifest(root: Path, path: str) -> Manifest:
    try:
        with os.fdopen(os.open(root / path, _READ), "rb") as file:
            data = file.read(_MOST_BYTES)
        if not intact(data):
            raise DamagedError("its checksum is not that of its bytes")
        return Manifest.from_json(data)
    except OSError as error:
        raise DamagedError(f"{root / path}: cannot be read: {error.strerror}") from None
    except DamagedError as error:
        raise DamagedError(f"{root / path}: {error}") from None
