"""Info and stack files of an API dump: formats and parses their lines, keys and entries
(troubleshooter 1.0.17 and 1.0.18). Pure.

    [name, step, marks, dtype, shape, [max, min, mean]]                  up to 1.0.17
    [name, step, marks, dtype, shape, [max, min, mean], md5, l2norm]     1.0.18

The info file has one JSON array per line, with the tokens NaN and Infinity. The original tool
always writes step 1 and no marks. Numbers are those of a float32 if the tensor's type is not wider.
The stack file is one JSON object with an indent of 4: for each call the lines of its stack,
innermost call first.

    torch.nn.Conv2d(0) forward       torch.nn.functional.relu(3) forward
    torch.Tensor.permute(0) forward  torch.matmul(0) forward
    LAYER: blocks.0.conv forward     NN_Conv2d_0_forward_stack_info

The last form is used for MindSpore, by releases up to 1.0.15, and for calls that are not torch's.
The original tool spells most modules in LAYER marks wrongly; here they have their path, if it is
given with dots.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np

from rankdump._core.graph import SourceLine
from rankdump._layout.api_tree import (
    LAYER_KIND,
    RECOMPUTED_MARK,
    ApiCall,
    ApiFileNames,
    ApiPlace,
    parse_call_name,
    parse_direction,
)
from rankdump._layout.profile import format_type_label
from rankdump.errors import CorruptedError

SUMMARY_ITEMS = ("max", "min", "avg")
"""Statistics in every line, in this order, by the names of `_core.statistics`."""
RECOMPUTED_MARKS = json.dumps([RECOMPUTED_MARK])
_NO_ENTRIES, _UNKNOWN_NUMBER = "[]", "NaN"
_SHORT_LINE_FIELDS, _LONG_LINE_FIELDS = 6, 8
_TORCH_PREFIX = "torch."
_CLASS_FORM = "<class '{}'>"
_WIDE_TYPES = ("float64", "int64", "uint64", "int32", "uint32")
"""Types with numbers that a float32 cannot hold."""
_SCALAR_TYPES = {"int": "int64", "float": "float64", "bool": "bool"}
"""Element type with which each type of Python numbers is dumped."""
_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_quote_text = json.encoder.encode_basestring_ascii


@dataclass(frozen=True, slots=True)
class InfoLine:
    """Parsed line of an info file."""

    name: str
    """Name of the tensor, such as `NN_Conv2d_0_forward_input.0`."""
    step: int
    recomputed: bool
    dtype: str
    """Element type as the line spells it."""
    shape: tuple[int, ...]
    statistics: Mapping[str, float]
    """Maximum, minimum, mean and norm; those that the line lacks, or that are NaN, are left out."""
    md5: str
    """MD5 of the tensor; empty if the line has none."""


def format_info_line(
    files: ApiFileNames,
    *,
    name: str,
    step: int,
    place: ApiPlace,
    dtype: str,
    shape: tuple[int, ...],
    statistics: Mapping[str, str],
) -> str:
    """Return the line of a tensor, without the line end.

    `statistics` are texts by the names of `_core.statistics`; a missing statistic becomes NaN.
    """
    marks = RECOMPUTED_MARKS if place.recomputed else _NO_ENTRIES
    if place.scalar:
        summary = ", ".join(
            _format_scalar(place.scalar, statistics.get(item)) for item in SUMMARY_ITEMS
        )
        element = _CLASS_FORM.format(place.scalar)
    else:
        known = dtype != "bool"
        summary = ", ".join(
            _format_number(dtype, statistics.get(item) if known else None) for item in SUMMARY_ITEMS
        )
        element = format_dtype_name(files.framework, dtype)
    start = (
        f"[{_quote_text(name)}, {step}, {marks}, {_quote_text(element)}, "
        f"{_format_extents(shape)}, [{summary}]"
    )
    if not files.extended:
        return f"{start}]"
    md5, norm = statistics.get("md5"), statistics.get("l2norm")
    if place.scalar:
        md5, norm = md5 and _compute_scalar_md5(place.scalar, statistics), None
    l2norm = _NO_ENTRIES if norm is None else _format_number(dtype, norm)
    return f"{start}, {_quote_text(md5) if md5 else _NO_ENTRIES}, {l2norm}]"


@lru_cache(maxsize=64)
def format_dtype_name(framework: str, dtype: str) -> str:
    """Return an element type as a framework prints it, such as `torch.float32` or `Float32`."""
    return format_type_label(dtype) if framework == "mindspore" else _TORCH_PREFIX + dtype


def parse_dtype_name(text: str) -> str:
    """Return the common name of an element type that a line spells in this way."""
    if text.startswith("<class '"):
        return _SCALAR_TYPES.get(text[len("<class '") : -len("'>")], text)
    plain = text.removeprefix(_TORCH_PREFIX).lower()
    return plain.replace("float8e", "float8_e")


def parse_info_line(text: str, *, file: str) -> InfoLine:
    """Parse one line; CorruptedError quotes it if it has another form."""
    try:
        fields: Any = json.loads(text)
        return _parse_info_fields(fields)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise CorruptedError(
            f"{file}: not a line of an info file: {text[:60]!r}: {error}"
        ) from None


def _parse_info_fields(fields: Any) -> InfoLine:
    if not isinstance(fields, list) or len(cast("list[Any]", fields)) not in (
        _SHORT_LINE_FIELDS,
        _LONG_LINE_FIELDS,
    ):
        raise ValueError(f"it is not a list of {_SHORT_LINE_FIELDS} or {_LONG_LINE_FIELDS} fields")
    name, step, marks, dtype, shape, summary, *rest = cast("list[Any]", fields)
    if not isinstance(name, str) or not isinstance(dtype, str) or type(step) is not int:
        raise ValueError("its name, step or type has the wrong type")
    extents = tuple(shape)
    if not all(type(extent) is int and extent >= 0 for extent in extents):
        raise ValueError(f"shape {shape!r}")
    md5, l2norm = rest or (None, None)
    pairs: list[tuple[str, Any]] = [*zip(SUMMARY_ITEMS, summary, strict=True), ("l2norm", l2norm)]
    found = {item: float(value) for item, value in pairs if isinstance(value, (int, float))}
    return InfoLine(
        name=name,
        step=step,
        recomputed=RECOMPUTED_MARK in marks,
        dtype=dtype,
        shape=extents,
        statistics={item: value for item, value in found.items() if not math.isnan(value)},
        md5=md5 if isinstance(md5, str) else "",
    )


def _format_number(dtype: str, text: str | None) -> str:
    """Return a statistic in the form that JSON has it."""
    if text is None:
        return _UNKNOWN_NUMBER
    value = float(text)
    if not math.isfinite(value):
        return _UNKNOWN_NUMBER if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    wide = dtype in _WIDE_TYPES or abs(value) > _MAX_FLOAT32
    return repr(value if wide else float(np.float32(value)))


def _format_scalar(kind: str, text: str | None) -> str:
    if text is None:
        return _UNKNOWN_NUMBER
    value = float(text)
    if kind == "float" or not math.isfinite(value):
        return _format_number("float64", text)
    return str(int(value)) if kind == "int" else str(bool(value)).lower()


def _compute_scalar_md5(kind: str, statistics: Mapping[str, str]) -> str:
    """Return the digest of a number's text, as in the original tool; empty without a number."""
    text = next((statistics[item] for item in SUMMARY_ITEMS if item in statistics), None)
    if text is None:
        return ""
    value = float(text)
    if math.isfinite(value) and kind != "float":
        value = int(value) if kind == "int" else bool(value)
    return hashlib.md5(str(value).encode(), usedforsecurity=False).hexdigest()


@lru_cache(maxsize=1024)
def _format_extents(shape: tuple[int, ...]) -> str:
    return json.dumps(shape)


_KEY_PREFIXES = {
    "Functional": "torch.nn.functional.",
    "NN": "torch.nn.",
    "Tensor": "torch.Tensor.",
    "Torch": "torch.",
}
"""Prefixes of the keys of torch's calls by kind, longer ones first."""
_PLAIN_KEY_SUFFIX = "_stack_info"
_MODULE_KEY = re.compile(rf"{LAYER_KIND}: (?P<path>.+) (?P<direction>forward|backward)", re.S)
_CALL_KEY = re.compile(
    r"(?P<api>.+)\((?P<number>[0-9]{1,18})\) (?P<direction>forward|backward)", re.S
)
_STACK_LINE = re.compile(
    r"File (?P<file>.*), line (?P<line>[0-9]{1,9}), in (?P<function>.*?), \n ?", re.S
)
_MAX_LINE_CHARACTERS = 1 << 14
"""Maximum length of a line that is matched: matching a longer one could take seconds."""
_INDENT = " " * 4


def make_stack_key(framework: str, op_name: str) -> str:
    """Return the key of a call in the stack file, given its name, such as `NN_Conv2d_0_forward`.

    The name of a module may be `LAYER_blocks.0.conv_forward`, if its path is known.
    """
    call = parse_call_name(op_name) if framework == "torch" else None
    if call is not None and call.kind == LAYER_KIND:
        return f"{LAYER_KIND}: {call.api} {call.direction}"
    if call is None or call.kind not in _KEY_PREFIXES:
        return f"{op_name}{_PLAIN_KEY_SUFFIX}"
    return f"{_KEY_PREFIXES[call.kind]}{call.api}({call.number}) {call.direction}"


def parse_stack_key(key: str) -> str:
    """Return the name of the call that a key stands for, as in tensor names; empty for a key of
    another form.
    """
    if key.endswith(_PLAIN_KEY_SUFFIX):
        return key.removesuffix(_PLAIN_KEY_SUFFIX)
    module = _MODULE_KEY.fullmatch(key)
    if module is not None:
        return f"{LAYER_KIND}_{module['path'].replace('.', '_')}_{module['direction']}"
    for kind, opens in _KEY_PREFIXES.items():
        found = _CALL_KEY.fullmatch(key.removeprefix(opens)) if key.startswith(opens) else None
        if found is not None:
            direction = parse_direction(found["direction"])
            return ApiCall(kind, found["api"], int(found["number"]), direction).name
    return ""


def is_module_key(key: str) -> bool:
    """Return whether a key belongs to a module; it repeats with every call of the module."""
    return key.startswith((f"{LAYER_KIND}: ", f"{LAYER_KIND}_"))


def format_stack_entry(key: str, lines: tuple[str, ...]) -> str:
    """Return an entry of the stack file, without the comma after it."""
    if not lines:
        return f"{_INDENT}{_quote_text(key)}: []"
    body = ",\n".join(f"{_INDENT}{_INDENT}{_quote_text(line)}" for line in lines)
    return f"{_INDENT}{_quote_text(key)}: [\n{body}\n{_INDENT}]"


def read_stack_key(line: str) -> str:
    """Return the key of the entry that begins in a line of the stack file; empty if none begins
    there.
    """
    if not line.startswith(f'{_INDENT}"') or not line.endswith((": [", ": []", ": [],")):
        return ""
    try:
        key: object = json.loads(line.rpartition(": [")[0])
    except ValueError:
        return ""
    return key if isinstance(key, str) else ""


def parse_source_line(text: str) -> SourceLine | None:
    """Return the source line that a line of a stack describes; None if it describes none."""
    found = _STACK_LINE.match(text) if len(text) <= _MAX_LINE_CHARACTERS else None
    if found is None:
        return None
    return SourceLine(found["file"], int(found["line"]), found["function"], text[found.end() :])
