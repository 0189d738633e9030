"""Fields of messages: conversion between messages and frozen values with the same fields, text that
a message can hold, and the limits on length, count and size that are checked before anything from
the other side is used. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import cache, partial
from operator import attrgetter
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

from rankdump._core.black_box import FaultKind
from rankdump._core.events import EventKind, FindingKind
from rankdump._core.job_control import ControlAction
from rankdump._core.record import TensorSide
from rankdump._core.status import SessionState
from rankdump._core.tensor_layout import LayoutSource, PlacementKind
from rankdump._core.timeouts import HintLevel
from rankdump._kernels.kernel_functions import KERNELS
from rankdump.errors import ProtocolError
from rankdump.wire.v1 import agent_pb2, status_pb2

_T = TypeVar("_T")
_FieldConverter = Callable[[Any], Any]


def make_fields(value: object, *apart: str, replace: bool = False) -> dict[str, Any]:
    """Return the fields of the message of a dataclass value, except those named in `apart`.

    With `replace`, texts come from the user and are passed through `replace_surrogates`.
    """
    return {name: get(value) for name, get in _list_writers(type(value), apart, replace)}


def from_message(kind: type[_T], message: Message, /, **rest: Any) -> _T:
    """Return the dataclass `kind` with the fields of a message; `rest` gives the fields that are
    not taken from the message.

    ProtocolError names an unknown word or number of an enumeration.
    """
    return _make_message_reader(kind, tuple(rest))(message, **rest)


encode_varint = KERNELS.functions.encode_varint
VARINT, LENGTH_DELIMITED = 0, 2
"""Wire types of fields (Protocol Buffers, Encoding)."""


def make_tag(message: Message, field: str, wire_type: int) -> bytes:
    """Return the tag of a field, which precedes the field's value."""
    return encode_varint(message.DESCRIPTOR.fields_by_name[field].number << 3 | wire_type)


def replace_surrogates(text: str) -> str:
    """Return a name in a form that a message can contain.

    Names come from the user; an unpaired surrogate in a name must not end the sender's thread.
    """
    return text if text.isascii() else text.encode(errors="replace").decode()


ENUM_VALUES: Mapping[type[Enum], Mapping[Any, Any]] = {
    SessionState: {
        SessionState.OPEN: status_pb2.SESSION_STATE_OPEN,
        SessionState.CLOSED: status_pb2.SESSION_STATE_CLOSED,
        SessionState.LOST: status_pb2.SESSION_STATE_LOST,
    },
    TensorSide: {
        TensorSide.INPUT: agent_pb2.SIDE_INPUT,
        TensorSide.OUTPUT: agent_pb2.SIDE_OUTPUT,
    },
    **{
        kind: {each: each.value for each in kind}
        for kind in (
            *(EventKind, FindingKind, HintLevel, LayoutSource, PlacementKind),
            *(FaultKind, ControlAction),
        )
    },
}
"""Number in messages of each member of an enumeration."""
_ENUM_MEMBERS = {
    kind: {value: member for member, value in values.items()}
    for kind, values in ENUM_VALUES.items()
}
_UNKNOWN_TEXTS: Mapping[type[Enum], str] = {
    EventKind: "an event has the unknown kind",
    FindingKind: "a finding has the unknown kind",
    HintLevel: "a hint has the unknown level",
    LayoutSource: "a layout has the unknown source",
    PlacementKind: "a layout has the unknown placement",
    SessionState: "a session has the unknown state",
    TensorSide: "a record has the unknown side",
}


def parse_member(kind: type[Enum], value: object) -> Any:
    """Return the member that a number in messages stands for; ProtocolError if there is none."""
    member = _ENUM_MEMBERS[kind].get(value)
    if member is None:
        raise ProtocolError(f"{_UNKNOWN_TEXTS[kind]} {value!r}")
    return member


@cache
def _list_writers(
    kind: type, apart: tuple[str, ...], replace: bool
) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    writers = ((name, _make_writer(hint, replace)) for name, hint in _list_hints(kind, apart))
    return tuple((name, _make_getter(name, write)) for name, write in writers)


def _make_getter(name: str, write: _FieldConverter | None) -> Callable[[Any], Any]:
    get = attrgetter(name)
    return get if write is None else lambda value: write(get(value))


@cache
def _make_message_reader(kind: type[_T], apart: tuple[str, ...]) -> Callable[..., _T]:
    hints = dict(_list_hints(kind, apart))
    readers = ((name, _make_reader(hint)) for name, hint in hints.items())
    changed = [(name, read) for name, read in readers if read is not None]
    optional = [name for name, hint in hints.items() if type(hint) is UnionType]

    def read_message(message: Message, /, **rest: Any) -> _T:
        values = {name: getattr(message, name) for name in hints}
        for name, read in changed:
            values[name] = read(values[name])
        for name in optional:
            if not message.HasField(name):
                values[name] = None
        return kind(**values, **rest)

    return read_message


def _list_hints(kind: type, apart: tuple[str, ...]) -> Iterable[tuple[str, Any]]:
    return ((name, hint) for name, hint in get_type_hints(kind).items() if name not in apart)


def _make_writer(hint: Any, replace: bool) -> _FieldConverter | None:
    """Return the function that converts a value to a field of a message; None if the value is used
    as it is.
    """
    if hint is str:
        return replace_surrogates if replace else None
    if hint in ENUM_VALUES:
        return ENUM_VALUES[hint].__getitem__
    if type(hint) is UnionType:
        write = _make_writer(get_args(hint)[0], replace)
        return write and (lambda value: None if value is None else write(value))
    if is_dataclass(hint):
        return partial(make_fields, replace=replace)
    if get_origin(hint) is tuple:
        write = _make_writer(get_args(hint)[0], replace)
        return write and (lambda values: [*map(write, values)])
    return _replace_in_mapping if replace and get_origin(hint) is Mapping else None


def _replace_in_mapping(texts: Mapping[str, str]) -> dict[str, str]:
    return {replace_surrogates(name): replace_surrogates(text) for name, text in texts.items()}


def _make_reader(hint: Any) -> _FieldConverter | None:
    """Return the function that converts a field of a message to a value; None if the field is used
    as it is.
    """
    if hint in ENUM_VALUES:
        return partial(parse_member, hint)
    if type(hint) is UnionType:
        return _make_reader(get_args(hint)[0])
    if isinstance(hint, type) and is_dataclass(hint):
        return _make_message_reader(hint, ())
    if get_origin(hint) is tuple:
        read = _make_reader(get_args(hint)[0])
        return tuple if read is None else (lambda values: tuple(map(read, values)))
    return dict if get_origin(hint) is Mapping else None


MAX_NAME_CHARACTERS = 4096
"""Maximum characters of the name of an operator, a group, a job and the like."""
MAX_LINE_CHARACTERS = 256
"""Maximum characters of the name of a host, a framework or a device."""
MAX_NOTES = 256
NUMBER_LIMIT = 1 << 63
"""Numbers from the wire must be below this limit, because they are stored in signed
64-bit columns.
"""


def check_text(what: str, text: str, most: int = MAX_NAME_CHARACTERS) -> str:
    """Return a text; ProtocolError if it is longer than `most` or contains a NUL."""
    if len(text) > most:
        raise ProtocolError(f"{what} of {len(text)} characters, at most {most}")
    if "\0" in text:
        raise ProtocolError(f"{what} {text[:80]!r} contains a NUL")
    return text


def check_count(what: str, count: int, most: int) -> None:
    """Raise ProtocolError if a count is above `most`."""
    if count > most:
        raise ProtocolError(f"{count} {what}, at most {most}")


def check_numbers(what: str, numbers: Iterable[int]) -> None:
    """Raise ProtocolError if a number does not fit into a signed 64-bit column."""
    highest = max(numbers, default=0)
    if highest >= NUMBER_LIMIT:
        raise ProtocolError(f"{what}: the number {highest} is over {NUMBER_LIMIT - 1}")


def make_sendable(text: str, most: int = MAX_NAME_CHARACTERS) -> str:
    """Return a name that the other side accepts: a long one is cut, and a NUL or an unpaired
    surrogate is replaced.
    """
    return replace_surrogates(text[:most]).replace("\0", "\ufffd")


def make_printable(text: str, most: int = MAX_LINE_CHARACTERS) -> str:
    """Return a text for people: cut to `most` characters, and with a mark for each
    unprintable one.
    """
    text = text[:most]
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else "\ufffd" for each in text)


def make_notes_printable(notes: Iterable[str]) -> tuple[str, ...]:
    """Return sentences for people; if there are more than MAX_NOTES, the last one says how many are
    left out.
    """
    kept = [make_printable(note, MAX_NAME_CHARACTERS) for note in notes]
    if len(kept) <= MAX_NOTES:
        return tuple(kept)
    return (*kept[: MAX_NOTES - 1], f"and {len(kept) - MAX_NOTES + 1} more notes")
