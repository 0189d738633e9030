"""JSON twins of pages: values of Python as JSON has them, and who asks for one. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from decimal import Decimal
from enum import Enum
from typing import Any, cast

import numpy as np
from starlette.requests import Request


def make_body(value: Any) -> Any:
    """Return a value as JSON has it: NaN and infinities become texts."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Decimal) and value.is_finite():
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, np.generic | np.ndarray):
        return make_body(cast("Any", value).tolist())
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: make_body(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, tuple) and hasattr(cast("object", value), "_asdict"):
        return {name: make_body(each) for name, each in cast("Any", value)._asdict().items()}
    if isinstance(value, Mapping):
        named = cast("Mapping[object, Any]", value)
        return {str(name): make_body(each) for name, each in named.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [make_body(each) for each in cast("Sequence[Any]", value)]
    return str(value)


def wants_json(request: Request) -> bool:
    """Return whether JSON is asked for, by the path or by the header `Accept`."""
    accepted = request.headers.get("accept", "")
    return request.scope["path"].endswith(".json") or accepted.startswith("application/json")
