"""The info file of an api dump: its lines, written and read. Pure.

    [name, step, marks, dtype, shape, [max, min, mean]]                  up to 1.0.17
    [name, step, marks, dtype, shape, [max, min, mean], md5, l2norm]     1.0.18

Source: api-dump.md A.3. One JSON array a line, with the tokens NaN and Infinity. The real tool
always says step 1 and no marks. Numbers are those of a float32 where the tensor is no wider.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np

from rankdump.contract.errors import DamagedError
from rankdump.contract.layout.api_name import RECOMPUTED, ApiPlace
from rankdump.contract.layout.api_tree import ApiFiles

SUMMARY = ("max", "min", "avg")
"""Figures of every line, in their order, by the names of `contract.statistics`."""
MARKED = json.dumps([RECOMPUTED])
_NONE, _UNKNOWN = "[]", "NaN"
_SHORT, _LONG = 6, 8
_TORCH = "torch."
_CLASS = "<class '{}'>"
_WIDE = ("float64", "int64", "uint64", "int32", "uint32")
"""Types of which a float32 cannot hold every number."""
_SCALARS = {"int": "int64", "float": "float64", "bool": "bool"}
"""How a number of Python is dumped."""
_MOST_FLOAT32 = float(np.finfo(np.float32).max)
_text = json.encoder.encode_basestring_ascii


@dataclass(frozen=True, slots=True)
class InfoLine:
    """One line, read back."""

    name: str
    """Of the tensor, `NN_Conv2d_0_forward_input.0`."""
    step: int
    recomputed: bool
    dtype: str
    """As the line spells it."""
    shape: tuple[int, ...]
    figures: Mapping[str, float]
    """Max, min, mean and norm, those of them that the line has; a NaN is none of these."""
    md5: str
    """Empty where the line has none."""


def line(
    files: ApiFiles,
    *,
    name: str,
    step: int,
    place: ApiPlace,
    dtype: str,
    shape: tuple[int, ...],
    figures: Mapping[str, str],
) -> str:
    """Return the line of a tensor, without its end.

    `figures` are texts by the names of `contract.statistics`; what is missing is NaN.
    """
    marks = MARKED if place.recomputed else _NONE
    if place.scalar:
        summary = ", ".join(_scalar(place.scalar, figures.get(item)) for item in SUMMARY)
        element = _CLASS.format(place.scalar)
    else:
        known = dtype != "bool"
        summary = ", ".join(
            _number(dtype, figures.get(item) if known else None) for item in SUMMARY
        )
        element = dtype_name(files.framework, dtype)
    start = f"[{_text(name)}, {step}, {marks}, {_text(element)}, {_extents(shape)}, [{summary}]"
    if not files.extended:
        return f"{start}]"
    md5, norm = figures.get("md5"), figures.get("l2norm")
    if place.scalar:
        md5, norm = md5 and _scalar_md5(place.scalar, figures), None
    l2norm = _NONE if norm is None else _number(dtype, norm)
    return f"{start}, {_text(md5) if md5 else _NONE}, {l2norm}]"


@lru_cache(maxsize=64)
def dtype_name(framework: str, dtype: str) -> str:
    """Return an element type as a framework's own text has it: `torch.float32`, `Float32`."""
    if framework != "mindspore":
        return _TORCH + dtype
    for plain, label in (("bfloat", "BFloat"), ("uint", "UInt"), ("float8_", "Float8")):
        if dtype.startswith(plain):
            return label + dtype.removeprefix(plain).upper()
    return dtype.capitalize()


def element_of(text: str) -> str:
    """Return the common name of an element type as a line spells it."""
    if text.startswith("<class '"):
        return _SCALARS.get(text[len("<class '") : -len("'>")], text)
    plain = text.removeprefix(_TORCH).lower()
    return plain.replace("float8e", "float8_e")


def parse(text: str, *, file: str) -> InfoLine:
    """Read one line; DamagedError names what it is instead."""
    try:
        fields: Any = json.loads(text)
        return _parsed(fields)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise DamagedError(f"{file}: no line of an info file: {text[:60]!r}: {error}") from None


def _parsed(fields: Any) -> InfoLine:
    if not isinstance(fields, list) or len(cast("list[Any]", fields)) not in (_SHORT, _LONG):
        raise ValueError(f"it is no list of {_SHORT} or {_LONG} fields")
    name, step, marks, dtype, shape, summary, *rest = cast("list[Any]", fields)
    if not isinstance(name, str) or not isinstance(dtype, str) or type(step) is not int:
        raise ValueError("name, step or type is none")
    extents = tuple(shape)
    if not all(type(extent) is int and extent >= 0 for extent in extents):
        raise ValueError(f"shape {shape!r}")
    md5, l2norm = rest or (None, None)
    pairs: list[tuple[str, Any]] = [*zip(SUMMARY, summary, strict=True), ("l2norm", l2norm)]
    found = {item: float(value) for item, value in pairs if isinstance(value, (int, float))}
    return InfoLine(
        name=name,
        step=step,
        recomputed=RECOMPUTED in marks,
        dtype=dtype,
        shape=extents,
        figures={item: value for item, value in found.items() if not math.isnan(value)},
        md5=md5 if isinstance(md5, str) else "",
    )


def _number(dtype: str, text: str | None) -> str:
    """Return a figure as JSON has it."""
    if text is None:
        return _UNKNOWN
    value = float(text)
    if not math.isfinite(value):
        return _UNKNOWN if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    wide = dtype in _WIDE or abs(value) > _MOST_FLOAT32
    return repr(value if wide else float(np.float32(value)))


def _scalar(kind: str, text: str | None) -> str:
    if text is None:
        return _UNKNOWN
    value = float(text)
    if kind == "float" or not math.isfinite(value):
        return _number("float64", text)
    return str(int(value)) if kind == "int" else str(bool(value)).lower()


def _scalar_md5(kind: str, figures: Mapping[str, str]) -> str:
    """Return the digest of a number's text, as the real tool has it; nothing where it is lost."""
    text = next((figures[item] for item in SUMMARY if item in figures), None)
    if text is None:
        return ""
    value = float(text)
    if math.isfinite(value) and kind != "float":
        value = int(value) if kind == "int" else bool(value)
    return hashlib.md5(str(value).encode(), usedforsecurity=False).hexdigest()


@lru_cache(maxsize=1024)
def _extents(shape: tuple[int, ...]) -> str:
    return json.dumps(shape)
