"""Speed of the kernels, against memcpy of the same bytes: statistics of each element type,
statistics with a copy, fingerprints, and numpy's twin of each.

Tensors are larger than the caches, and processed in turns. Ratios are of the least of all rounds:
other work on the machine only ever slows a round down, and a kernel has no pauses of its own.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from rankdump._kernels.element_moments import ALL_PARTS, ELEMENT_CODES, EXTREMES, SUMS, find_address
from rankdump._kernels.kernel_functions import KERNELS, load_kernels

from .result import Result
from .timing import seconds

TENSOR_BYTES = 96_000_000
ROUNDS = 15
NUMPY_ROUNDS = 3
SHORT_NAMES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}
DEFAULT_PARTS = EXTREMES | SUMS
"""What max, min and l2norm need."""

_Work = Callable[[], object]


def measure() -> Result:
    """Run all kernels in turns with memcpy, then those of numpy."""
    held = {name: _make_elements(name) for name in ELEMENT_CODES}
    target = np.zeros(TENSOR_BYTES, np.uint8)
    least_s = _find_least(_list_work(held, target), ROUNDS)
    twin_s = _find_least(_list_twin_work(held), NUMPY_ROUNDS)
    memcpy_s = least_s["memcpy"]
    figures = {f"{name}_gb_per_s": TENSOR_BYTES / s / 1e9 for name, s in least_s.items()}
    figures |= {f"numpy_{name}_gb_per_s": TENSOR_BYTES / s / 1e9 for name, s in twin_s.items()}
    figures["fingerprint_gb_per_s"] = figures["fingerprint_f32_gb_per_s"]
    figures["small_statistics_ns"] = _measure_small() * 1e9
    ratios = {f"{name}_vs_memcpy": memcpy_s / s for name, s in least_s.items() if name != "memcpy"}
    return Result(figures=figures, ratios=ratios)


def _list_work(
    held: dict[str, npt.NDArray[np.uint8]], target: npt.NDArray[np.uint8]
) -> dict[str, _Work]:
    functions, to = KERNELS.functions, find_address(target)
    work: dict[str, _Work] = {
        "memcpy": lambda: ctypes.memmove(to, find_address(held["float32"]), TENSOR_BYTES)
    }
    for name, code in ELEMENT_CODES.items():
        short, at = SHORT_NAMES.get(name, name), find_address(held[name])
        count = TENSOR_BYTES // _count_bytes(name)
        work[f"statistics_{short}"] = _bind(functions.measure_elements, at, count, code, ALL_PARTS)
        if name in SHORT_NAMES:
            work[f"default_statistics_{short}"] = _bind(
                functions.measure_elements, at, count, code, DEFAULT_PARTS
            )
            work[f"fingerprint_{short}"] = _bind(
                functions.fingerprint_shard, at, code, (count,), (1,), 0
            )
    columns = TENSOR_BYTES // 4 // 768
    work["fingerprint_f32_shard"] = _bind(
        functions.fingerprint_shard,
        find_address(held["float32"]),
        ELEMENT_CODES["float32"],
        (columns, 768),
        (4 * 768, 1),
        768,
    )
    return work


def _list_twin_work(held: dict[str, npt.NDArray[np.uint8]]) -> dict[str, _Work]:
    functions = load_kernels("numpy").functions
    work: dict[str, _Work] = {}
    for name, short in SHORT_NAMES.items():
        count, at = TENSOR_BYTES // _count_bytes(name), find_address(held[name])
        work[f"statistics_{short}"] = _bind(
            functions.measure_elements, at, count, ELEMENT_CODES[name], ALL_PARTS
        )
    work["fingerprint_f32"] = _bind(
        functions.fingerprint_shard,
        find_address(held["float32"]),
        ELEMENT_CODES["float32"],
        (TENSOR_BYTES // 4,),
        (1,),
        0,
    )
    return work


def _bind(function: Callable[..., object], *arguments: object) -> _Work:
    return lambda: function(*arguments)


def _find_least(work: dict[str, _Work], rounds: int) -> dict[str, float]:
    """Return the least seconds of each, after one round that warms up."""
    taken: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(rounds + 1):
        for name, each in work.items():
            taken[name].append(seconds(each))
    return {name: min(found[1:]) for name, found in taken.items()}


def _measure_small() -> float:
    """Return the seconds for the default statistics of 64 elements, a call from Python included."""
    elements, code = np.ones(64, np.float32), ELEMENT_CODES["float32"]
    at, calls, function = find_address(elements), 10_000, KERNELS.functions.measure_elements

    def run() -> None:
        for _ in range(calls):
            function(at, 64, code, DEFAULT_PARTS)

    return min(seconds(run) for _ in range(ROUNDS)) / calls


def _make_elements(name: str) -> npt.NDArray[np.uint8]:
    """Return the bytes of elements like those after a ReLU: half of them are zero."""
    count = TENSOR_BYTES // _count_bytes(name)
    # Repeated: numbers that no kernel predicts take longer to make than to measure.
    some = np.maximum(np.random.default_rng(0).standard_normal(1 << 20, np.float32) * 50, 0)
    if name == "bfloat16":
        made = (some.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    else:
        made = some.astype(name)
    return np.resize(made, count).view(np.uint8)


def _count_bytes(name: str) -> int:
    return 2 if name == "bfloat16" else np.dtype(name).itemsize
