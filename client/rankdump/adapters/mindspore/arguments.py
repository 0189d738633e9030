"""Reads what a cell was configured with: its public attributes, and those of its primitives.

Only plain values count, which print the same in every run; never tensors, cells or initializers.
"""

from __future__ import annotations

from typing import Any, cast

from rankdump.adapters.mindspore.framework import (
    PLAIN_TYPES,
    STATE_ATTRIBUTES,
    attributes_of,
    flags_of,
    primitives_of,
)

_MAX_CHARACTERS = 1024
_MAX_PARTS = 64
_NO_ARGUMENTS = frozenset(("input_names", "output_names", "dump"))
"""Attributes of primitives that say what its places are called, and what is dumped."""


def arguments_of(cell: Any) -> dict[str, str]:
    """Return the cell's arguments as texts, sorted by name.

    Those of a primitive stand behind its name in the cell: `matmul.transpose_b`.
    """
    left_out = STATE_ATTRIBUTES | flags_of(cell).keys()
    found = {
        name: str(value)
        for name, value in attributes_of(cell).items()
        if not name.startswith("_") and name not in left_out and _plain(value)
    }
    for name, primitive in primitives_of(cell):
        for key, value in primitive.attrs.items():
            if key not in _NO_ARGUMENTS and not key.startswith("side_effect") and _plain(value):
                found[f"{name}.{key}"] = str(value)
    return dict(sorted(found.items()))


def _plain(value: object, depth: int = 2) -> bool:
    if isinstance(value, str):
        return len(value) <= _MAX_CHARACTERS
    if isinstance(value, (tuple, list)):
        parts = cast("tuple[Any, ...]", value)
        return depth > 0 and len(parts) <= _MAX_PARTS and all(_plain(p, depth - 1) for p in parts)
    return isinstance(value, PLAIN_TYPES)
