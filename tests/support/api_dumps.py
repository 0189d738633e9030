"""API dumps for tests: info files, npy files, and the manifests of rankdump's own."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rankdump._codec.file_codec import get_codec


@dataclass(frozen=True)
class ApiDumpLine:
    """One tensor of a dump."""

    name: str
    array: npt.NDArray[Any] = field(default_factory=lambda: np.zeros((2, 3), np.float32))
    step: int = 1
    recomputed: bool = False

    def text(self, *, figures: bool = True, extended: bool = False) -> str:
        whole = [float(self.array.max()), float(self.array.min()), float(self.array.mean())]
        three = whole if figures and self.array.size else [math.nan] * 3
        marks = ["recompute"] if self.recomputed else []
        fields = [self.name, self.step, marks, "torch.float32", list(self.array.shape), three]
        return json.dumps([*fields, [], 1.5] if extended else fields)


def write_dump(
    root: Path,
    lines: Sequence[ApiDumpLine],
    *,
    rank: int = 0,
    framework: str = "torch",
    npy: bool = True,
    codec: str = "none",
    ours: bool = False,
    info: str = "pkl",
    figures: bool = True,
) -> Path:
    """Write what one rank dumped; return the root."""
    folder = root / f"rank{rank}"
    tensors = folder / f"{framework}_api_dump"
    tensors.mkdir(parents=True)
    if ours:
        (folder / ".dump_metadata" / "manifest").mkdir(parents=True)
    texts = [line.text(figures=figures, extended=info == "csv") + "\n" for line in lines]
    (folder / f"{framework}_api_dump_info.{info}").write_text("".join(texts))
    packing = get_codec(codec)
    for line in lines if npy else ():
        path = tensors / f"{line.name}.npy"
        np.save(path, line.array)
        parts = packing.encode([path.read_bytes()])
        path.unlink()
        (tensors / f"{line.name}.npy{packing.suffix}").write_bytes(b"".join(parts))
    return root


def call(
    name: str, shape: tuple[int, ...] = (2, 3), *, step: int = 1, recomputed: bool = False
) -> list[ApiDumpLine]:
    """Return the tensors of a forward call with one input and one output."""
    filled = np.full(shape, 1.0, np.float32)
    return [
        ApiDumpLine(f"{name}_forward_{place}", filled, step, recomputed)
        for place in ("input.0", "output")
    ]


def gradient(name: str, shape: tuple[int, ...] = (2, 3), *, step: int = 1) -> ApiDumpLine:
    """Return the gradient of what a call returned."""
    return ApiDumpLine(f"{name}_backward_input", np.full(shape, 0.5, np.float32), step)
