"""Speed of comparing two trees, against loading and comparing the same files with numpy alone.

Trees of 2 GB, written by an agent: the same values twice, and once more with all slightly changed.
numpy has uncompressed files in the page cache and one thread, like each process of rankdump.

`fingerprint_trees_s` and `fingerprint_trees_peak_mb` are of two trees of a million fingerprints and
statistics each, half of them equal, in a process of its own on two cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

import rankdump
from rankdump._analysis.compare.pair_comparison import count_pair_bytes
from rankdump._analysis.compare.report import DumpedTensor, PairOutcome, TensorPair, TensorVerdict
from rankdump.reader import Entry

from .fingerprint_trees import FingerprintTrees, compare_trees, write_trees
from .host import Host, memory_folder, running_host
from .result import Result, median
from .timing import seconds
from .trees import check_complete

MIX = (
    (64 << 20, 8),
    (16 << 20, 32),
    (4 << 20, 128),
    (1 << 20, 256),
    (256 << 10, 512),
    (64 << 10, 1024),
)
"""Bytes of a tensor, and number of such tensors."""
QUICK_MIX = ((1 << 20, 4), (64 << 10, 16))
TREES, QUICK_TREES = FingerprintTrees(8, 125), FingerprintTrees(8, 4)
ROUNDS = 3
_RTOL = _ATOL = 1e-4
_NOISE = 1 + 1e-3

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Timed:
    """One pair of trees."""

    bytes_both: int
    own_s: float
    numpy_s: float
    """0 when numpy cannot read the files."""


def measure(*, quick: bool = False) -> Result:
    """Compare each pair of trees, alternating with numpy."""
    mix = QUICK_MIX if quick else MIX
    with running_host() as host:
        _dump(host, "a", mix)
        _dump(host, "same", mix)
        identical = _timed(host, "a", "same", TensorVerdict.SAME)
        host.remove_tensors("same")
        _dump(host, "off", mix, factor=_NOISE)
        different = _timed(host, "a", "off", TensorVerdict.DIFFERENT)
        host.remove_tensors("a")
        host.remove_tensors("off")
        half = tuple((size, max(1, count // 4)) for size, count in mix)
        _dump(host, "packed-a", half, relu=True, codec="zstd")
        _dump(host, "packed-off", half, relu=True, codec="zstd", factor=_NOISE)
        packed = _timed(host, "packed-a", "packed-off", TensorVerdict.DIFFERENT, plain=False)
    trees = QUICK_TREES if quick else TREES
    with memory_folder() as folder:
        tree_s, peak_mb = compare_trees(write_trees(folder, trees), trees)
    found = _result(identical, different, packed)
    own = {"fingerprint_trees_s": tree_s, "fingerprint_trees_peak_mb": peak_mb}
    return Result(figures={**found.figures, **own}, ratios=found.ratios)


def _result(identical: Timed, different: Timed, packed: Timed) -> Result:
    return Result(
        figures={
            "gb": different.bytes_both / 1e9,
            "identical_gb_per_s": identical.bytes_both / identical.own_s / 1e9,
            "different_gb_per_s": different.bytes_both / different.own_s / 1e9,
            "numpy_gb_per_s": different.bytes_both / different.numpy_s / 1e9,
            "packed_different_gb_per_s": packed.bytes_both / packed.own_s / 1e9,
        },
        ratios={
            "speed_vs_numpy_different": different.numpy_s / different.own_s,
            "speed_vs_numpy_identical": identical.numpy_s / identical.own_s,
        },
    )


def _dump(
    host: Host,
    name: str,
    mix: Sequence[tuple[int, int]],
    *,
    factor: float = 1.0,
    relu: bool = False,
    codec: str = "none",
) -> None:
    """Write a tree of distinct tensors by the agent; the same again on request."""
    numbers = np.random.default_rng(0).standard_normal(max(mix)[0] // 2, np.float32)
    if relu:
        np.maximum(numbers, 0, out=numbers)
    with host.session(name, {"codec": codec}) as session:
        session.step(0)
        at = 0
        for size, count in mix:
            for _ in range(count):
                at += 1
                tensor = numbers[at : at + size // 4] * np.float32(factor)
                operator = f"Default/layer{at}-Dense/Dense-op0"
                session.dump("Dense", operator, "output", 0, tensor)
    check_complete(host.tree(name))


def _timed(host: Host, a: str, b: str, verdict: TensorVerdict, *, plain: bool = True) -> Timed:
    """Compare two trees, alternating with numpy, which gets the paths for free."""
    trees = host.tree(a), host.tree(b)
    pairs = _pairs(*trees)
    own_s: list[float] = []
    numpy_s: list[float] = []
    found: list[PairOutcome] = []
    for _ in range(ROUNDS):
        own_s.append(seconds(lambda: found.extend(_compared(*trees))))
        if plain:
            numpy_s.append(seconds(lambda: _with_numpy(pairs)))
    if any(each.verdict is not verdict for each in found):
        raise RuntimeError(f"{a} and {b} are not {verdict.value}")
    size = sum(map(count_pair_bytes, pairs))
    return Timed(size, median(own_s), median(numpy_s) if plain else 0.0)


def _compared(a: Path, b: Path) -> list[PairOutcome]:
    return [row.outcome for row in rankdump.compare(a, b).rows]


def _pairs(a: Path, b: Path) -> list[TensorPair]:
    left, right = ({e.op_name: e for e in rankdump.open(tree).tensors()} for tree in (a, b))
    return [TensorPair(_tensor(left[name]), _tensor(right[name])) for name in left]


def _tensor(entry: Entry) -> DumpedTensor:
    record = entry.record
    assert record is not None
    key = entry.key
    return DumpedTensor(key.side, key.slot, "", record.dtype, record.shape, record.digest, entry)


def _with_numpy(pairs: Sequence[TensorPair]) -> None:
    for pair in pairs:
        left, right = (np.load(each.entry.path) for each in (pair.a, pair.b) if each and each.entry)
        np.allclose(left, right, rtol=_RTOL, atol=_ATOL)
