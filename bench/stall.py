"""Time for which a tensor blocks the training thread, against a copy and a file of the same bytes.

The buffer is never full: a round fills half of it, and the next one waits until the agent has
written everything. Nothing but the calls of `Session.dump` is timed.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import rankdump

from .arrays import Tensors, activations, dump, numpy_save_s, stamp
from .host import Host, memory_folder, running_host
from .result import Result, median
from .timing import seconds

SIZES_MIB = (1, 4, 16, 64)
ROUND_MIB = 128
BUFFER_BYTES = 2 * ROUND_MIB << 20
WARMUP_ROUNDS = 3
"""Rounds after which every page of the buffer was used once."""
ROUNDS = 7
_GB = ROUND_MIB * (1 << 20) / 1e9


def measure() -> Result:
    """Measure dump, memcpy and numpy.save alternately, for each size."""
    # Each size cuts the same bytes differently.
    flat = activations(1, ROUND_MIB << 18)
    with (
        running_host() as host,
        memory_folder() as folder,
        host.session("stall", {"buffer_bytes": BUFFER_BYTES}) as session,
    ):
        rounds = Rounds(host, session, folder, flat)
        for _ in range(WARMUP_ROUNDS):
            rounds.run(SIZES_MIB[0])
        found = {size: [rounds.run(size) for _ in range(ROUNDS)] for size in SIZES_MIB}
    return _result(found)


class Rounds:
    """Runs rounds; each dumps, copies and saves all bytes once."""

    def __init__(self, host: Host, session: rankdump.Session, folder: Path, flat: Tensors) -> None:
        self._host, self._session, self._folder = host, session, folder
        self._flat = flat
        # Touched before it is measured: a first touch costs more than the copy.
        self._target = np.ones_like(flat)
        self._iteration = 0

    def run(self, size_mib: int) -> tuple[float, float, float]:
        """Return the seconds of dump, memcpy and numpy.save, in tensors of that size."""
        shape = (-1, size_mib << 18)
        tensors, target = self._flat.reshape(shape), self._target.reshape(shape)
        stamp(tensors, self._iteration)
        self._session.step(self._iteration)
        dump_s = seconds(lambda: dump(self._session, tensors))
        self._session.step(self._iteration + 1)
        self._host.wait_until_written("stall", self._iteration)
        self._iteration += 1
        return dump_s, seconds(lambda: _copy(tensors, target)), numpy_save_s(self._folder, tensors)


def _copy(tensors: Tensors, target: Tensors) -> None:
    for tensor, place in zip(tensors, target, strict=True):
        np.copyto(place, tensor)


def _result(found: dict[int, list[tuple[float, float, float]]]) -> Result:
    figures: dict[str, float] = {}
    by_memcpy: dict[str, float] = {}
    by_save: dict[str, float] = {}
    limits: dict[str, float] = {}
    for size, rounds in found.items():
        dump_s, copy_s, save_s = (median(column) for column in zip(*rounds, strict=True))
        suffix = f"{size}mib"
        figures[f"blocked_s_per_gb_{suffix}"] = dump_s / _GB
        figures[f"memcpy_s_per_gb_{suffix}"] = copy_s / _GB
        figures[f"numpy_save_s_per_gb_{suffix}"] = save_s / _GB
        by_memcpy[f"blocked_vs_memcpy_{suffix}"] = dump_s / copy_s
        by_save[f"blocked_vs_numpy_save_{suffix}"] = dump_s / save_s
        # What no copy can be below.
        limits[f"memcpy_vs_numpy_save_{suffix}"] = copy_s / save_s
    # The promise is for every size, so the worst one stands for all.
    worst = {
        "blocked_vs_memcpy": max(by_memcpy.values()),
        "blocked_vs_numpy_save": max(by_save.values()),
    }
    return Result(figures=figures, ratios=worst | by_memcpy | by_save | limits)
