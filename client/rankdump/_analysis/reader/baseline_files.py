"""Files of tensors that a dump does not contain, because the tensors are the same in its baseline.

The baseline is looked for at the path that it had when the dump was made, then beside the dump
under the same name, because both may have been copied to another host.
"""

from __future__ import annotations

import os
import stat
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from rankdump._analysis.reader.tree import Entry
from rankdump._core.element_types import convert_from_stored
from rankdump._core.manifest import Manifest, ManifestRecord
from rankdump._core.units import format_count
from rankdump.errors import CorruptedError


def find_tensor_file(entry: Entry) -> Path:
    """Return the file of a tensor, in its own tree or in the baseline.

    CorruptedError if the baseline does not have the file any more.
    """
    record = entry.record
    if record is None or not record.same_as:
        return entry.path
    found = find_baseline_file(entry.root, record)
    if found is None:
        text = f"its elements are in the baseline {record.baseline}, where {record.same_as}"
        raise CorruptedError(f"{entry.path}: {text} is not there")
    return found


def find_baseline_file(root: Path, record: ManifestRecord) -> Path | None:
    """Return the file in a tree's baseline that has the elements of a record; None if there is
    none.
    """
    if record.same_as.startswith("/") or ".." in record.same_as.split("/"):
        return None
    for place in list_baseline_places(root, record.baseline):
        path = place / record.same_as
        try:
            if stat.S_ISREG(os.lstat(path).st_mode):
                return path
        except (OSError, ValueError):
            continue
    return None


def list_baseline_places(root: Path, baseline: str) -> tuple[Path, Path]:
    """Return the paths at which the baseline of a tree may be."""
    return Path(baseline), root.absolute().parent / Path(baseline).name


def is_baseline_missing(entry: Entry) -> bool:
    """Return whether only the digest of a tensor is left, because the baseline with its file is
    gone.
    """
    record = entry.record
    return entry.is_same_as_baseline and (
        record is None or find_baseline_file(entry.root, record) is None
    )


def check_content(entry: Entry, path: Path, tensor: npt.NDArray[Any]) -> None:
    """Raise a CorruptedError if a file of the baseline does not have the elements of the record."""
    record = entry.record
    if record is None or not record.same_as:
        return
    stored = memoryview(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
    held = convert_from_stored(record.dtype, stored)
    if record.digest not in map(xxhash.xxh3_128_hexdigest, held):
        raise CorruptedError(f"{path}: it has changed since it was the same as {entry.path}")


def describe_baselines(root: Path, manifests: Iterable[Manifest]) -> list[str]:
    """Return a sentence for each baseline of a tree: how many of the tree's tensors it has or
    lacks.
    """
    counts: Counter[str] = Counter()
    missing: defaultdict[str, set[str]] = defaultdict(set)
    for manifest in manifests:
        for record in manifest.records:
            if record.same_as:
                counts[record.baseline] += 1
                if find_baseline_file(root, record) is None:
                    missing[record.baseline].add(record.same_as)
    found: list[str] = []
    for baseline, count in sorted(counts.items()):
        text = f"the elements of {format_count(count, 'tensor')} are in the baseline {baseline}"
        if missing[baseline]:
            text += f", where {format_count(len(missing[baseline]), 'file')} cannot be found"
        found.append(text)
    return found
