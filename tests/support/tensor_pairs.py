"""Pairs of tensors in files of a folder, as input of a comparison."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xxhash

from rankdump._analysis.compare.report import DumpedTensor, TensorPair
from rankdump._analysis.compare.tensor_blocks import TensorElements
from rankdump._codec.file_codec import get_codec
from rankdump._core import npy_format
from rankdump._core.record import TensorKey, TensorSide
from rankdump.reader import Entry


def tensor(
    folder: Path,
    name: str,
    values: np.ndarray,
    *,
    dtype: str = "",
    digest: bool = False,
    codec: str = "none",
) -> DumpedTensor:
    """Write an array to a file; return the tensor as a tree would know it."""
    folder.mkdir(parents=True, exist_ok=True)
    packer = get_codec(codec)
    path = folder / f"{name}.npy{packer.suffix}"
    parts = packer.encode(
        [npy_format.format_npy_header(values.dtype.str, values.shape), values.tobytes()]
    )
    path.write_bytes(b"".join(parts))
    return DumpedTensor(
        TensorSide.OUTPUT,
        0,
        "",
        dtype or values.dtype.name,
        values.shape,
        xxhash.xxh3_128_hexdigest(values.tobytes()) if digest else "",
        entry_of(path),
    )


def entry_of(path: Path) -> Entry:
    """Return the entry of a file, which may be none."""
    key = TensorKey(0, "Net", 0, 1, 1, "Op", path.stem, TensorSide.OUTPUT, 0)
    size = path.stat().st_size if path.is_file() else 0
    return Entry(path.parent, path.name, key, size)


def pair(
    folder: Path, name: str, a: np.ndarray, b: np.ndarray, *, codec: str = "none"
) -> TensorPair:
    """Write both sides of a pair."""
    return TensorPair(
        tensor(folder / "a", name, a, codec=codec), tensor(folder / "b", name, b, codec=codec)
    )


def path_of(tensor: DumpedTensor | None) -> Path:
    """Return where a tensor that was written stands."""
    assert tensor is not None
    assert tensor.entry is not None
    return tensor.entry.path


def read_all(elements: TensorElements) -> np.ndarray:
    """Return the whole tensor as an array."""
    buffer = np.empty(elements.size * elements.dtype.itemsize, np.uint8).data
    return elements.part(0, elements.size, buffer).reshape(elements.shape)
