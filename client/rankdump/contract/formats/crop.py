"""Which part of a converted tensor is no padding, by msaccucmp's rules. Pure.

Source: ascend-formats.md 3.3.
"""

from __future__ import annotations

import math


def cropped(shape: tuple[int, ...], original: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape without padding; None when the original one is not a part of it.

    The original shape is taken as it is, with ones behind it: it is not brought into the order of
    the target. Where nothing is padded there is nothing to crop, whatever the order.
    """
    if not original or math.prod(original) == math.prod(shape):
        return shape
    wanted = original + (1,) * (len(shape) - len(original))
    if len(wanted) > len(shape) or not all(0 < w <= s for w, s in zip(wanted, shape, strict=True)):
        return None
    return wanted
