"""Tensors without a framework, made, dumped and saved with numpy alone: an array has one a row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

import rankdump

from .timing import seconds

Tensors = npt.NDArray[np.float32]


def activations(tensors: int, elements: int) -> Tensors:
    """Return tensors like those after a ReLU: half of their elements are zero."""
    numbers = np.random.default_rng(0)
    return np.maximum(numbers.standard_normal((tensors, elements), np.float32), 0)


def stamp(tensors: Tensors, turn: int) -> None:
    """Make tensors that differ from each other and from those of any other turn.

    Equal ones could be linked to a file that is there already, and nothing would be measured.
    """
    tensors[:, 0] = np.arange(len(tensors)) + len(tensors) * turn


def dump(session: rankdump.Session, tensors: Tensors, op_type: str = "ReLU") -> None:
    """Dump each tensor as the output of an operator of its own."""
    for slot, tensor in enumerate(tensors):
        session.dump(op_type, f"Default/layer{slot}-{op_type}/{op_type}-op0", "output", 0, tensor)


def numpy_save_s(folder: Path, tensors: Tensors) -> float:
    """Return the seconds that `numpy.save` takes for all, each into a new file."""
    paths = [folder / f"{slot}.npy" for slot in range(len(tensors))]

    def save() -> None:
        for path, tensor in zip(paths, tensors, strict=True):
            np.save(path, tensor)

    save_s = seconds(save)
    for path in paths:
        path.unlink()
    return save_s
