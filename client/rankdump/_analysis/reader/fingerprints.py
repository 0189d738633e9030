"""Fingerprints for the records of manifests, read from the files beside the manifests. Every file
is compared with its size and digest in the manifest before a row is used; nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy.typing as npt
import xxhash

from rankdump._analysis.reader.file_errors import named_errors, noted_errors
from rankdump._analysis.reader.manifests import list_manifest_files, list_rank_folders
from rankdump._analysis.table.tree_access import LocalTree, TreeAccess
from rankdump._core.manifest import (
    FingerprintSeal,
    Manifest,
    ManifestRecord,
    make_fingerprint_name,
)
from rankdump._core.tensor_fingerprint import parse_fingerprint_file
from rankdump._layout.tree_paths import FINGERPRINT_FOLDER, MANIFEST_FOLDER
from rankdump.errors import CorruptedError


class RecordedFingerprint(NamedTuple):
    """Fingerprint of a tensor as it was recorded in a tree."""

    digest: int | None
    """Digest from 0 to 2**64 - 1; None for partial values, whose bits do not add up."""
    sketch: bytes
    """Sums of the sketch as float32, little endian."""


FingerprintsByRecord: TypeAlias = "dict[tuple[int, ManifestRecord], RecordedFingerprint]"
"""Fingerprints by rank and record."""


def find_fingerprint_path(manifest_path: str) -> str:
    """Return the path of the fingerprint file beside a manifest; both paths are relative to the
    root.
    """
    folder, _, name = manifest_path.rpartition("/")
    rank_folder = folder.removesuffix(f"/{MANIFEST_FOLDER}")
    return f"{rank_folder}/{FINGERPRINT_FOLDER}/{make_fingerprint_name(name)}"


def check_fingerprint_file(
    data: bytes | memoryview, seal: FingerprintSeal, records: int
) -> npt.NDArray[Any]:
    """Return the rows of a fingerprint file; CorruptedError when the file does not match the
    manifest.
    """
    _check_size(len(data), seal)
    digest = xxhash.xxh3_128_hexdigest(data)
    if digest != seal.digest:
        raise CorruptedError(f"its digest is {digest}, but its manifest has {seal.digest:.64}")
    return parse_fingerprint_file(data, records)


def _check_size(size: int, seal: FingerprintSeal) -> None:
    if size != seal.bytes:
        raise CorruptedError(f"it has {size} bytes, but its manifest has {seal.bytes}")


def read_fingerprints(
    access: TreeAccess, manifest_path: str, manifest: Manifest, records: int, problems: list[str]
) -> npt.NDArray[Any] | None:
    """Return the rows of the fingerprint file beside a manifest with `records` records; None if
    there is no file.

    Adds a problem for a file that is damaged or cannot be read.
    """
    if manifest.fingerprints is None:
        return None
    path = find_fingerprint_path(manifest_path)
    folder, _, name = path.rpartition("/")
    with noted_errors(problems), named_errors(access.root / path):
        # checked first, so that a huge file is not read
        _check_size(access.stat(path).st_size, manifest.fingerprints)
        return check_fingerprint_file(access.read(folder, name), manifest.fingerprints, records)
    return None


def read_fingerprints_of_tree(
    root: Path, keeps: Callable[[int, int], bool], problems: list[str]
) -> FingerprintsByRecord:
    """Return the fingerprints of the kept ranks and iterations of a tree; reads only the manifests
    of ranks that have some.
    """
    found: FingerprintsByRecord = {}
    for folder in list_rank_folders(root):
        if not (root / folder / FINGERPRINT_FOLDER).is_dir():
            continue
        for path, *_ in list_manifest_files(root, folder, []):
            try:
                manifest = Manifest.from_json(path.read_bytes())
            except (OSError, CorruptedError):
                continue  # reported when the tree is read
            if keeps(manifest.status.rank, manifest.status.iteration):
                _add_records(found, root, path.relative_to(root).as_posix(), manifest, problems)
    return found


def _add_records(
    found: FingerprintsByRecord, root: Path, path: str, manifest: Manifest, problems: list[str]
) -> None:
    records = manifest.records
    rows = read_fingerprints(LocalTree(root), path, manifest, len(records), problems)
    if rows is None:
        return
    sketches = rows["sketch"]
    for at, (number, digest) in enumerate(
        zip(rows["record"].tolist(), rows["fingerprint"].tolist(), strict=True)
    ):
        print_of_record = RecordedFingerprint(digest, sketches[at].tobytes())
        found[manifest.status.rank, records[number]] = print_of_record
