"""Conversion of frozen dataclasses to and from JSON, by the types of their fields. Pure.

A value that does not have the type of its field raises ValueError, which names the class and the
field, the value, and what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
_ValueReader = Callable[[Any], Any]
_SCALARS: Mapping[type, tuple[tuple[type, ...], str]] = {
    str: ((str,), "a string"),
    int: ((int,), "an integer"),
    bool: ((bool,), "true or false"),
    float: ((float, int), "a number"),
}
"""For each scalar type of a field: the types of JSON values that it accepts, and their name in
messages.
"""


class _ReadRules(NamedTuple):
    defaults: bool
    unknown: bool
    minimum: int | None


def make_plain(value: Any) -> dict[Any, Any]:
    """Return a dataclass or a mapping as a dictionary; used as the argument `default` of
    `json.dumps`.
    """
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return dict(value)


def read_json(
    kind: type[_T],
    body: object,
    *,
    defaults: bool = False,
    unknown: bool = False,
    minimum: int | None = None,
) -> _T:
    """Return the instance of the dataclass `kind` that a JSON value describes.

    With `defaults`, fields that have a default value may be absent; with `unknown`, unknown fields
    are ignored. Integers below `minimum` are rejected.
    """
    return _make_class_reader(kind, _ReadRules(defaults, unknown, minimum))(body)


@cache
def _make_class_reader(kind: Any, rules: _ReadRules) -> _ValueReader:
    readers = {
        name: _make_reader(hint, f"{kind.__name__}.{name}", rules)
        for name, hint in get_type_hints(kind).items()
    }
    needed = {
        field.name
        for field in fields(kind)
        if not rules.defaults or (field.default is MISSING and field.default_factory is MISSING)
    }

    def read_class(body: Any) -> Any:
        _check_type(kind.__name__, body, dict)
        if body.keys() == readers.keys():
            return kind(**{name: read(body[name]) for name, read in readers.items()})
        if missing := needed - body.keys():
            raise ValueError(f"{kind.__name__}.{min(missing)} is missing")
        if not rules.unknown and (extra := body.keys() - readers.keys()):
            raise ValueError(f"{kind.__name__} has the unknown field {min(extra)[:60]!r}")
        return kind(**{name: read(body[name]) for name, read in readers.items() if name in body})

    return read_class


def _make_reader(hint: Any, where: str, rules: _ReadRules) -> _ValueReader:
    """Return the function that converts a JSON value to the type of a field."""
    origin, args = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return _make_class_reader(hint, rules)
    if type(hint) is UnionType:
        read = _make_reader(args[0], where, rules)
        return lambda value: None if value is None else read(value)
    if origin is tuple:
        return _make_list_reader(args, where, rules)
    if origin is Mapping:
        return _make_mapping_reader(args, where, rules)
    if origin is Literal:
        return _make_choice_reader({word: word for word in args}, where)
    if issubclass(hint, Enum):
        return _make_choice_reader({member.value: member for member in hint}, where)
    return _make_scalar_reader(hint, where, rules.minimum)


def _make_scalar_reader(kind: type, where: str, minimum: int | None) -> _ValueReader:
    types, allowed = _SCALARS[kind]
    lowest = minimum if kind is int else None
    if lowest is not None:
        allowed = f"{allowed} of at least {lowest}"

    def read_scalar(value: Any) -> Any:
        if type(value) not in types or (lowest is not None and value < lowest):
            _reject(where, value, allowed)
        return value

    return read_scalar


def _make_choice_reader(choices: Mapping[str, Any], where: str) -> _ValueReader:
    def read_choice(value: Any) -> Any:
        if type(value) is not str or value not in choices:
            _reject(where, value, f"one of {', '.join(choices)}")
        return choices[value]

    return read_choice


def _make_list_reader(hints: tuple[Any, ...], where: str, rules: _ReadRules) -> _ValueReader:
    readers = [_make_reader(hint, where, rules) for hint in hints if hint is not ...]
    length = None if hints[-1] is ... else len(readers)

    def read_list(value: Any) -> tuple[Any, ...]:
        _check_type(where, value, list)
        if length is None:
            return tuple(map(readers[0], value))
        if len(value) != length:
            _reject(where, value, f"a list of {length}")
        return tuple(read(each) for read, each in zip(readers, value, strict=True))

    return read_list


def _make_mapping_reader(hints: tuple[Any, ...], where: str, rules: _ReadRules) -> _ValueReader:
    make_key, read = hints[0], _make_reader(hints[1], where, rules)

    def read_mapping(value: Any) -> dict[Any, Any]:
        _check_type(where, value, dict)
        if make_key is int and not all(map(str.isdecimal, value)):
            _reject(where, value, "an object with integers as names")
        return {make_key(key): read(each) for key, each in value.items()}

    return read_mapping


def _check_type(where: str, value: object, kind: type[list[Any] | dict[str, Any]]) -> None:
    if type(value) is not kind:
        _reject(where, value, "a list" if kind is list else "an object")


def _reject(where: str, value: object, allowed: str) -> NoReturn:
    raise ValueError(f"{where} is {value!r:.60}, not {allowed}")
