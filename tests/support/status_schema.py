"""JSON schema of `rankdump status --json`, made from printed values and their documentation.

`python tests/support/status_schema.py > docs/status.schema.json`, which is `make schema`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any

from rankdump._core import events, status, timeouts
from rankdump._core import status as core_status
from rankdump._core.status import StatusView
from rankdump._core.timeouts import TimeoutHint

_BARE: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    bool: {"type": "boolean"},
    float: {"type": "number"},
}


def schema() -> dict[str, Any]:
    """Return the schema of the object that the command prints."""
    found: dict[str, dict[str, Any]] = {}
    top = _of_dataclass(StatusView, found)
    share = {"type": "number", "description": "Used share of the limit."}
    found[TimeoutHint.__name__]["properties"]["share"] = share
    found[TimeoutHint.__name__]["required"].append("share")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "rankdump status --json",
        **top,
        "$defs": dict(sorted(found.items())),
    }


def _of_dataclass(kind: Any, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    words, hints = _words(kind), typing.get_type_hints(kind)
    properties: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        said = {"description": words[field.name]} if field.name in words else {}
        properties[field.name] = {**_of(hints[field.name], found), **said}
    return {
        "type": "object",
        "description": inspect.cleandoc(kind.__doc__),
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _of(kind: Any, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in _BARE:
        return dict(_BARE[kind])
    if origin is tuple:
        return {"type": "array", "items": _of(arguments[0], found)}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _of(arguments[1], found)}
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [_of(each, found) for each in arguments]}
    if kind is type(None):
        return {"type": "null"}
    if issubclass(kind, Enum):
        return {"enum": [member.value for member in kind]}
    if kind.__name__ not in found:
        found[kind.__name__] = {}
        found[kind.__name__] = _of_dataclass(kind, found)
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _words(kind: Any) -> dict[str, str]:
    """Return what the source says below each field."""
    module = next(
        m for m in (status, events, core_status, timeouts) if m.__name__ == kind.__module__
    )
    body = next(
        node.body
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    )
    said: dict[str, str] = {}
    for field, after in itertools.pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            said[field.target.id] = " ".join(str(after.value.value).split())
    return said


if __name__ == "__main__":
    print(json.dumps(schema(), indent=1))
