"""Content of every tensor of a job: a pure function of its name."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
from faults.values import TensorName

OP_TYPE = "Linear"
OPERATORS = 12
_MANY = 16
"""Slots of every fifth operator."""
_ALIKE = 7
"""Every seventh operator gives what it gave in the iteration before."""
_SAID = re.compile(r"life(\d+).*op(\d+)$")


def names(rank: int, life: int, iteration: int) -> Iterator[TensorName]:
    """Yield what a rank dumps in an iteration, in that order."""
    for number in range(OPERATORS):
        for slot in range(_MANY if number % 5 == 4 else 1):
            yield TensorName(rank, life, iteration, number, slot)


def kept(name: TensorName) -> bool:
    """Return whether it is kept: what has no elements is not."""
    return name.number != 0


def op_name(name: TensorName) -> str:
    """Return the full scope name of a tensor's operator."""
    return f"Default/life{name.life}-Net/fc-{OP_TYPE}/{OP_TYPE}-op{name.number}"


def name_of(rank: int, iteration: int, op: str, slot: int) -> TensorName | None:
    """Return which tensor has that name in the tree, sanitised or not; None for none at all."""
    said = _SAID.search(op)
    if said is None:
        return None
    name = TensorName(rank, int(said[1]), iteration, int(said[2]), slot)
    most = _MANY if name.number % 5 == 4 else 1
    return name if name.number < OPERATORS and slot < most else None


def tensor(name: TensorName) -> np.ndarray:
    """Return the elements: none, a few, pages, and at times more than half of a small slab."""
    # The one that is like its predecessor makes the agent link files.
    turn = name.iteration // 2 if name.number % _ALIKE == 3 else name.iteration
    first = ((name.rank * 131 + name.life) * 100_003 + turn) * 41 + name.number * 3 + name.slot
    if name.slot:
        return np.arange(first, first + 64, dtype=np.float32)
    if name.number == 0:
        return np.zeros((0, 3), np.float32)
    if name.number == 5 and turn % 4 == 1:
        return np.resize(np.arange(first, first + 251, dtype=np.int64).astype(np.uint8), 1048577)
    if name.number == 6 and turn % 12 == 2:
        return np.resize(np.arange(first, first + 1009, dtype=np.float32), 3 << 18)
    length = (1, 16, 1024, 4096)[name.number % 4]
    return np.arange(first, first + length, dtype=np.float32)
