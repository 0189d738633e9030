"""Overflow records of CANN: which task overflowed, on which unit, and how. Pure.

There are two binary layouts, which differ in their first word, and the JSON that msaccucmp makes
from either; MindSpore writes the members of the older layout in one line (CANN, msaccucmp).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from rankdump.errors import CorruptedError, UnsupportedError

OLD_RECORD_BYTES = 2048
OVERFLOW_MAGIC = 0x5A5A5A5A
UNKNOWN_FIELD = 65535
_HEX_FIELDS = frozenset(("pc_start", "para_base", "kernel_code", "src_addr", "dst_addr"))
"""Fields that are written as hexadecimal texts."""
_TASK_FIELDS = ("model_id", "stream_id", "task_id", "task_type")
_OLD_TASK_FIELDS = (*_TASK_FIELDS, "pc_start", "para_base")
_STATUS_FIELD = "status"
# Unit -> offset of its task, offset of its state, and names of the fields of the state.
_OLD_UNITS = {
    "DHA Atomic Add": (0, 512, (_STATUS_FIELD,)),
    "L2 Atomic Add": (128, 768, (_STATUS_FIELD,)),
    "AI Core": (256, 1024, ("kernel_code", "block_idx", _STATUS_FIELD)),
}
_RECORD_HEAD = struct.Struct("<6I")
_VERSIONS = (0, 1)
_STATUS_WORDS = 4
"""Number of words in the status of an AI core's unit in version 1."""
_THREAD_FIELDS = (*_TASK_FIELDS, "context_id", "thread_id")
_CORE_FIELDS = (*_THREAD_FIELDS, "pc_start", "para_base", "core_id", "block_id", _STATUS_FIELD)
_UNITS = {
    0: ("AIC", _CORE_FIELDS),
    1: ("AIV", _CORE_FIELDS),
    2: ("AICPU", (*_TASK_FIELDS, "context_id", "cpu_id", "thread_id", _STATUS_FIELD)),
    3: ("SDMA", (*_THREAD_FIELDS, "src_addr", "dst_addr", "channel_id", _STATUS_FIELD)),
}
_CORE_UNITS = ("AI Core", "AIC", "AIV")
_STATUS_BITS = {
    0x8: "smallest integer negated",
    0x10: "integer overflow",
    0x20: "float overflow",
    0x80: "negative float to unsigned integer",
    0x100: "float32 or int32 to float16",
    0x400: "accumulation in the cube unit",
}


@dataclass(frozen=True, slots=True)
class OverflowSection:
    """Section of one unit: its task and its status."""

    unit: str
    """Name of the unit: `DHA Atomic Add`, `L2 Atomic Add`, `AI Core`, or `AIC`, `AIV`, `AICPU`,
    `SDMA`.
    """
    fields: tuple[tuple[str, int], ...]
    """All fields except the status, in the order of the file."""
    status: tuple[int, ...]
    """Words of the status: one; four for an AI core in version 1."""

    @property
    def has_overflow(self) -> bool:
        """Whether any bit of the status is set."""
        return any(self.status)

    @property
    def meaning(self) -> tuple[str, ...]:
        """Meaning of the set bits in words; for units other than AI cores only whether any bit is
        set.
        """
        if self.unit not in _CORE_UNITS:
            return ("overflow",) * self.has_overflow
        first, *more = self.status
        words = [text for bit, text in _STATUS_BITS.items() if first & bit]
        unknown = first & ~sum(_STATUS_BITS)
        if unknown:
            words.append(f"bits {unknown:#x}")
        # The bits of the additional words are undocumented.
        words += [f"word {n}: {word:#x}" for n, word in enumerate(more, 1) if word]
        return tuple(words)

    def get_field(self, name: str) -> int | None:
        """Return the value of a field; None if the unit has no such field, or the value is not
        known.
        """
        value = dict(self.fields).get(name)
        return None if value == UNKNOWN_FIELD and name in ("context_id", "thread_id") else value


@dataclass(frozen=True, slots=True)
class OverflowHead:
    """Head of a record in the newer layout, which has one section."""

    version: int
    valid: int
    reserved: int
    data_len: int


@dataclass(frozen=True, slots=True)
class OpDebugRecord:
    """One overflow record."""

    sections: tuple[OverflowSection, ...]
    head: OverflowHead | None = None
    """Head of the record; None for the older layout."""

    @property
    def overflowed_sections(self) -> tuple[OverflowSection, ...]:
        """Sections that report an overflow."""
        return tuple(section for section in self.sections if section.has_overflow)

    def to_json(self) -> str:
        """Return the record as the text of msaccucmp's file, byte for byte."""
        made = {section.unit: _list_members(section) for section in self.sections}
        if self.head is None:
            return json.dumps(made, indent=4)
        ((unit, data),) = made.items()
        record = {
            "valid": self.head.valid,
            "acc_type": unit,
            "rsv": self.head.reserved,
            "data_len": self.head.data_len,
            "data": data,
        }
        whole = {"magic": hex(OVERFLOW_MAGIC), "version": self.head.version, "acc_list": record}
        return json.dumps(whole, indent=4)

    @staticmethod
    def from_json(text: str | bytes) -> OpDebugRecord:
        """Parse the JSON of msaccucmp or MindSpore; CorruptedError names what is missing."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            raise CorruptedError("not the JSON of an overflow record") from None
        if not isinstance(found, dict):
            raise CorruptedError("not the JSON of an overflow record: it is not an object")
        members = cast("dict[str, Any]", found)
        if "acc_list" in members:
            return _parse_new_json(members)
        known = [unit for unit in _OLD_UNITS if unit in members]
        if not known:
            raise CorruptedError(f"the JSON has none of {', '.join(_OLD_UNITS)}, acc_list")
        return OpDebugRecord(tuple(_parse_section_json(unit, members[unit]) for unit in known))


def parse_overflow_record(payload: bytes | memoryview) -> OpDebugRecord:
    """Parse the payload of an overflow file; CorruptedError if its size fits neither layout.

    UnsupportedError for a version or a unit that a newer release may have.
    """
    data = memoryview(payload)
    if int.from_bytes(data[:4], "little") == OVERFLOW_MAGIC:
        return _parse_new_record(data)
    if len(data) != OLD_RECORD_BYTES:
        raise CorruptedError(f"overflow record of {len(data)} bytes, {OLD_RECORD_BYTES} expected")
    return OpDebugRecord(tuple(_parse_old_sections(data)))


def convert_overflow_to_json(payload: bytes | memoryview) -> str:
    """Return the payload of an overflow file as msaccucmp's JSON."""
    return parse_overflow_record(payload).to_json()


def _parse_old_sections(data: memoryview) -> Iterator[OverflowSection]:
    for unit, (task_at, state_at, names) in _OLD_UNITS.items():
        task = zip(_OLD_TASK_FIELDS, _read_words(data, task_at, len(_OLD_TASK_FIELDS)), strict=True)
        state = dict(zip(names, _read_words(data, state_at, len(names)), strict=True))
        status = (state.pop(_STATUS_FIELD),)
        yield OverflowSection(unit, (*task, *state.items()), status)


def _parse_new_record(data: memoryview) -> OpDebugRecord:
    if len(data) < _RECORD_HEAD.size:
        raise CorruptedError(f"overflow record of {len(data)} bytes, but its head alone has 24")
    _, version, valid, kind, reserved, data_len = _RECORD_HEAD.unpack(data[: _RECORD_HEAD.size])
    if version not in _VERSIONS or kind not in _UNITS:
        raise UnsupportedError(
            f"overflow record of version {version} and unit {kind}; known: 0 and 1, 0 to 3"
        )
    unit, names = _UNITS[kind]
    count = _STATUS_WORDS if version == 1 and unit in _CORE_UNITS else 1
    due = _RECORD_HEAD.size + 8 * (len(names) - 1 + count)
    if len(data) < due:
        raise CorruptedError(f"overflow record of {len(data)} bytes, {unit} takes {due}")
    words = _read_words(data, _RECORD_HEAD.size, len(names) - 1 + count)
    fields = tuple(zip(names, words[:-count], strict=False))
    head = OverflowHead(version, valid, reserved, data_len)
    return OpDebugRecord((OverflowSection(unit, fields, words[-count:]),), head)


def _read_words(data: memoryview, at: int, count: int) -> tuple[int, ...]:
    return struct.unpack_from(f"<{count}Q", data, at)


def _list_members(section: OverflowSection) -> dict[str, Any]:
    made: dict[str, Any] = {
        name: hex(value) if name in _HEX_FIELDS else value for name, value in section.fields
    }
    status = section.status
    return made | {_STATUS_FIELD: status[0] if len(status) == 1 else list(status)}


def _parse_new_json(members: dict[str, Any]) -> OpDebugRecord:
    record = members["acc_list"]
    if not isinstance(record, dict):
        raise CorruptedError("acc_list is not an object")
    held = cast("dict[str, Any]", record)
    unit = held.get("acc_type")
    if unit not in [name for name, _ in _UNITS.values()]:
        raise UnsupportedError(f"overflow record of unit {unit!r}; known: AIC, AIV, AICPU, SDMA")
    numbers = [_check_number(name, held.get(name)) for name in ("valid", "rsv", "data_len")]
    head = OverflowHead(_check_number("version", members.get("version")), *numbers)
    return OpDebugRecord((_parse_section_json(str(unit), held.get("data")),), head)


def _parse_section_json(unit: str, members: object) -> OverflowSection:
    if not isinstance(members, dict):
        raise CorruptedError(f"{unit} is not an object")
    held = cast("dict[str, Any]", members)
    missing = [name for name in ("task_id", "stream_id", _STATUS_FIELD) if name not in held]
    if missing:
        raise CorruptedError(f"{unit} without {', '.join(missing)}")
    fields = tuple((n, _check_number(n, value)) for n, value in held.items() if n != _STATUS_FIELD)
    status = held[_STATUS_FIELD]
    words = cast("list[Any]", status) if isinstance(status, list) else [status]
    return OverflowSection(
        unit, fields, tuple(_check_number(_STATUS_FIELD, word) for word in words) or (0,)
    )


def _check_number(name: str, value: object) -> int:
    number = value
    if isinstance(value, str) and value.startswith("0x"):
        try:
            number = int(value, 16)
        except ValueError:
            number = None
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 1 << 64:
        shown = repr(value)[:40] if isinstance(value, str | int | float) else type(value).__name__
        raise CorruptedError(f"{name} is {shown}, not a 64-bit number")
    return number
