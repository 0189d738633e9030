"""Pairs of tensors in files of a folder, as a comparison meets them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xxhash

from rankdump.codec import codec_named
from rankdump.contract import npy
from rankdump.contract.key import Side, TensorKey
from rankdump.diff.values import Tensor, TensorPair
from rankdump.reader import Entry


def tensor(
    folder: Path,
    name: str,
    values: np.ndarray,
    *,
    dtype: str = "",
    digest: bool = False,
    codec: str = "none",
) -> Tensor:
    """Write an array to a file; return the tensor as a tree would know it."""
    folder.mkdir(parents=True, exist_ok=True)
    packer = codec_named(codec)
    path = folder / f"{name}.npy{packer.suffix}"
    parts = packer.encode([npy.header(values.dtype.str, values.shape), values.tobytes()])
    path.write_bytes(b"".join(parts))
    return Tensor(
        Side.OUTPUT,
        0,
        "",
        dtype or values.dtype.name,
        values.shape,
        xxhash.xxh3_128_hexdigest(values.tobytes()) if digest else "",
        entry_of(path),
    )


def entry_of(path: Path) -> Entry:
    """Return the entry of a file, which may be none."""
    key = TensorKey(0, "Net", 0, 1, 1, "Op", path.stem, Side.OUTPUT, 0)
    size = path.stat().st_size if path.is_file() else 0
    return Entry(path.parent, path.name, key, size)


def pair(folder: Path, name: str, a: np.ndarray, b: np.ndarray, **how: str) -> TensorPair:
    """Write both sides of a pair."""
    return TensorPair(tensor(folder / "a", name, a, **how), tensor(folder / "b", name, b, **how))
