"""Arguments of one call in a dump.json of msprobe: numbers and texts as they were, and places of
tensors by their number among the leaves, as `msprobe_dump` counts them. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from rankdump._layout.foreign_calls import MAX_JSON_DEPTH
from rankdump.errors import CorruptedError

_PLAIN_TYPES: Mapping[str, type] = {"int": int, "bool": bool, "str": str}


class TensorSlot(NamedTuple):
    """A tensor among the arguments."""

    slot: int


class UnknownValue(NamedTuple):
    """An argument that the dump does not hold."""

    kind: str
    """What the dump says of it, such as a type; empty without."""


class ForeignArguments(NamedTuple):
    """Arguments of a call."""

    args: list[Any]
    kwargs: dict[str, Any]


def parse_call_arguments(data: bytes, name: str) -> ForeignArguments | None:
    """Return the arguments of a forward call by msprobe's name; None if the file lacks it."""
    try:
        body: Any = json.loads(data)
        content = body["data"].get(name)
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise CorruptedError(f"not a dump.json of msprobe: {error!r:.80}") from None
    if not isinstance(content, dict):
        return None
    fields = cast("dict[str, Any]", content)
    reader = _ArgumentReader()
    args = fields.get("input_args")
    positional = [reader.read(each, 0) for each in (args if isinstance(args, list) else [])]  # pyright: ignore[reportUnknownVariableType]
    keywords = fields.get("input_kwargs")
    named = cast("dict[str, Any]", keywords) if isinstance(keywords, dict) else {}
    return ForeignArguments(positional, {key: reader.read(each, 0) for key, each in named.items()})


class _ArgumentReader:
    """Reads values, and counts their leaves."""

    def __init__(self) -> None:
        self._count = 0

    def read(self, value: Any, depth: int) -> Any:
        """Return one argument."""
        if depth > MAX_JSON_DEPTH:
            raise CorruptedError(f"arguments are nested more than {MAX_JSON_DEPTH} deep")
        if isinstance(value, list):
            return [self.read(part, depth + 1) for part in cast("list[Any]", value)]
        fields = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
        kind = fields.get("type")
        if fields and not isinstance(kind, str):
            return {key: self.read(part, depth + 1) for key, part in fields.items()}
        slot = self._count
        self._count += 1
        if value is None:
            return None
        if "shape" in fields and "dtype" in fields:
            return TensorSlot(slot)
        found: object = fields.get("value")
        if kind == "float" and isinstance(found, (float, int)):
            return float(found)
        if isinstance(kind, str) and type(found) is _PLAIN_TYPES.get(kind):
            return found
        return UnknownValue(kind if isinstance(kind, str) else "")
