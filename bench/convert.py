"""Speed of conversion from device formats, against a copy of the same bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rankdump._layout.device_formats import OriginalLayout, convert_format

from .result import Result, median
from .timing import seconds

ROUNDS = 15
_MB = 1e6


@dataclass(frozen=True, slots=True)
class Case:
    """One conversion of one tensor."""

    name: str
    source: str
    target: str
    dtype: str
    device: tuple[int, ...]
    original: tuple[int, ...]


CASES = (
    Case("nc1hwc0_nchw_fp16", "NC1HWC0", "NCHW", "f2", (32, 16, 56, 56, 16), (32, 256, 56, 56)),
    Case("nc1hwc0_nchw_fp32", "NC1HWC0", "NCHW", "f4", (32, 16, 56, 56, 16), (32, 256, 56, 56)),
    Case(
        "nc1hwc0_nchw_fp32_image", "NC1HWC0", "NCHW", "f4", (2, 4, 512, 512, 16), (2, 64, 512, 512)
    ),
    Case("fractal_nz_nd_fp16", "FRACTAL_NZ", "ND", "f2", (8, 64, 256, 16, 16), (8, 4090, 1020)),
    Case("fractal_nz_nd_fp32", "FRACTAL_NZ", "ND", "f4", (8, 64, 256, 16, 16), (8, 4090, 1020)),
)


def measure() -> Result:
    """Convert and copy alternately, each into its own memory."""
    found = {case.name: _measured(case) for case in CASES}
    ratios = {f"speed_vs_copy_{name}": copy_s / own_s for name, (_, own_s, copy_s) in found.items()}
    figures: dict[str, float] = {}
    for name, (size, own_s, copy_s) in found.items():
        figures[f"gb_per_s_{name}"] = size / own_s / 1e9
        figures[f"copy_gb_per_s_{name}"] = size / copy_s / 1e9
    # The promise is for every conversion, so the slowest one stands for all.
    return Result(figures=figures, ratios={"speed_vs_copy": min(ratios.values())} | ratios)


def _measured(case: Case) -> tuple[int, float, float]:
    """Return the bytes, and the seconds of a conversion and of a copy."""
    tensor = _tensor(case)
    origin = OriginalLayout(case.original)
    own_s: list[float] = []
    copy_s: list[float] = []
    for _ in range(ROUNDS):
        own_s.append(seconds(lambda: convert_format(tensor, case.source, case.target, origin)))
        copy_s.append(seconds(lambda: np.copy(tensor)))
    return tensor.nbytes, median(own_s), median(copy_s)


def _tensor(case: Case) -> npt.NDArray[Any]:
    numbers = np.random.default_rng(0)
    return numbers.standard_normal(case.device, np.float32).astype(case.dtype)
