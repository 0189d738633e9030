"""What CANN's overflow files say: which task overflowed, on which unit, and how. Pure.

Facts: ascend-formats.md 2.5. Two layouts of bytes, told apart by their first word, and the JSON
that msaccucmp makes of either; MindSpore writes the older one's members in one line.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from rankdump.contract.errors import DamagedError, UnsupportedError

OLD_BYTES = 2048
MAGIC = 0x5A5A5A5A
UNKNOWN_ID = 65535
_HEX = frozenset(("pc_start", "para_base", "kernel_code", "src_addr", "dst_addr"))
"""Fields that are written as hexadecimal texts."""
_TASK = ("model_id", "stream_id", "task_id", "task_type")
_OLD_TASK = (*_TASK, "pc_start", "para_base")
_STATUS = "status"
# Unit -> offsets of its task and of what it was doing, and the names of the latter.
_OLD = {
    "DHA Atomic Add": (0, 512, (_STATUS,)),
    "L2 Atomic Add": (128, 768, (_STATUS,)),
    "AI Core": (256, 1024, ("kernel_code", "block_idx", _STATUS)),
}
_HEAD = struct.Struct("<6I")
_VERSIONS = (0, 1)
_STATUS_WORDS = 4
"""Of version 1, for the units of an AI core."""
_THREAD = (*_TASK, "context_id", "thread_id")
_CORE = (*_THREAD, "pc_start", "para_base", "core_id", "block_id", _STATUS)
_UNITS = {
    0: ("AIC", _CORE),
    1: ("AIV", _CORE),
    2: ("AICPU", (*_TASK, "context_id", "cpu_id", "thread_id", _STATUS)),
    3: ("SDMA", (*_THREAD, "src_addr", "dst_addr", "channel_id", _STATUS)),
}
_CORES = ("AI Core", "AIC", "AIV")
_BITS = {
    0x8: "smallest integer negated",
    0x10: "integer overflow",
    0x20: "float overflow",
    0x80: "negative float to unsigned integer",
    0x100: "float32 or int32 to float16",
    0x400: "accumulation in the cube unit",
}


@dataclass(frozen=True, slots=True)
class Section:
    """One unit: the task that it worked on, and its status."""

    unit: str
    """`DHA Atomic Add`, `L2 Atomic Add`, `AI Core`, or `AIC`, `AIV`, `AICPU`, `SDMA`."""
    fields: tuple[tuple[str, int], ...]
    """Everything but the status, in the order of the file."""
    status: tuple[int, ...]
    """One word; of an AI core in version 1 four."""

    @property
    def overflowed(self) -> bool:
        """Whether any bit is set."""
        return any(self.status)

    @property
    def meaning(self) -> tuple[str, ...]:
        """What the bits say in words; of units other than AI cores only that there are any."""
        if self.unit not in _CORES:
            return ("overflow",) * self.overflowed
        first, *more = self.status
        words = [text for bit, text in _BITS.items() if first & bit]
        unknown = first & ~sum(_BITS)
        if unknown:
            words.append(f"bits {unknown:#x}")
        # The bits of the further words are described nowhere.
        words += [f"word {n}: {word:#x}" for n, word in enumerate(more, 1) if word]
        return tuple(words)

    def field(self, name: str) -> int | None:
        """Return a field; None where this unit has none of that name, or it is not known."""
        value = dict(self.fields).get(name)
        return None if value == UNKNOWN_ID and name in ("context_id", "thread_id") else value


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands in front of the one section of the newer layout."""

    version: int
    valid: int
    reserved: int
    data_len: int


@dataclass(frozen=True, slots=True)
class OpDebug:
    """One overflow record."""

    sections: tuple[Section, ...]
    frame: Frame | None = None
    """None for the older layout."""

    @property
    def overflowed(self) -> tuple[Section, ...]:
        """The sections that say so."""
        return tuple(section for section in self.sections if section.overflowed)

    def to_json(self) -> str:
        """Return the text of msaccucmp's file: its order of keys, four blanks, no last newline."""
        made = {section.unit: _members(section) for section in self.sections}
        if self.frame is None:
            return json.dumps(made, indent=4)
        ((unit, data),) = made.items()
        record = {
            "valid": self.frame.valid,
            "acc_type": unit,
            "rsv": self.frame.reserved,
            "data_len": self.frame.data_len,
            "data": data,
        }
        whole = {"magic": hex(MAGIC), "version": self.frame.version, "acc_list": record}
        return json.dumps(whole, indent=4)

    @staticmethod
    def from_json(text: str | bytes) -> OpDebug:
        """Read such a file, or MindSpore's; DamagedError says what is missing."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            raise DamagedError("not the JSON of an overflow record") from None
        if not isinstance(found, dict):
            raise DamagedError("not the JSON of an overflow record: no object")
        members = cast("dict[str, Any]", found)
        if "acc_list" in members:
            return _new_from(members)
        known = [unit for unit in _OLD if unit in members]
        if not known:
            raise DamagedError(f"JSON with none of {', '.join(_OLD)}, acc_list")
        return OpDebug(tuple(_section_from(unit, members[unit]) for unit in known))


def opdebug(payload: bytes | memoryview) -> OpDebug:
    """Read the payload of an overflow file; DamagedError when its size fits no layout.

    UnsupportedError for a version or a unit that a newer release may have.
    """
    data = memoryview(payload)
    if int.from_bytes(data[:4], "little") == MAGIC:
        return _new(data)
    if len(data) != OLD_BYTES:
        raise DamagedError(f"overflow record of {len(data)} bytes, {OLD_BYTES} expected")
    return OpDebug(tuple(_old_sections(data)))


def opdebug_json(payload: bytes | memoryview) -> str:
    """Return msaccucmp's JSON of such a payload."""
    return opdebug(payload).to_json()


def _old_sections(data: memoryview) -> Iterator[Section]:
    for unit, (task_at, state_at, names) in _OLD.items():
        task = zip(_OLD_TASK, _words(data, task_at, len(_OLD_TASK)), strict=True)
        state = dict(zip(names, _words(data, state_at, len(names)), strict=True))
        status = (state.pop(_STATUS),)
        yield Section(unit, (*task, *state.items()), status)


def _new(data: memoryview) -> OpDebug:
    if len(data) < _HEAD.size:
        raise DamagedError(f"overflow record of {len(data)} bytes, its head alone takes 24")
    _, version, valid, kind, reserved, data_len = _HEAD.unpack(data[: _HEAD.size])
    if version not in _VERSIONS or kind not in _UNITS:
        raise UnsupportedError(
            f"overflow record of version {version} and unit {kind}; known: 0 and 1, 0 to 3"
        )
    unit, names = _UNITS[kind]
    count = _STATUS_WORDS if version == 1 and unit in _CORES else 1
    due = _HEAD.size + 8 * (len(names) - 1 + count)
    if len(data) < due:
        raise DamagedError(f"overflow record of {len(data)} bytes, {unit} takes {due}")
    words = _words(data, _HEAD.size, len(names) - 1 + count)
    fields = tuple(zip(names, words[:-count], strict=False))
    frame = Frame(version, valid, reserved, data_len)
    return OpDebug((Section(unit, fields, words[-count:]),), frame)


def _words(data: memoryview, at: int, count: int) -> tuple[int, ...]:
    return struct.unpack_from(f"<{count}Q", data, at)


def _members(section: Section) -> dict[str, Any]:
    made: dict[str, Any] = {
        name: hex(value) if name in _HEX else value for name, value in section.fields
    }
    status = section.status
    return made | {_STATUS: status[0] if len(status) == 1 else list(status)}


def _new_from(members: dict[str, Any]) -> OpDebug:
    record = members["acc_list"]
    if not isinstance(record, dict):
        raise DamagedError("acc_list is no object")
    held = cast("dict[str, Any]", record)
    unit = held.get("acc_type")
    if unit not in [name for name, _ in _UNITS.values()]:
        raise UnsupportedError(f"overflow record of unit {unit!r}; known: AIC, AIV, AICPU, SDMA")
    numbers = [_number(name, held.get(name)) for name in ("valid", "rsv", "data_len")]
    frame = Frame(_number("version", members.get("version")), *numbers)
    return OpDebug((_section_from(str(unit), held.get("data")),), frame)


def _section_from(unit: str, members: object) -> Section:
    if not isinstance(members, dict):
        raise DamagedError(f"{unit} is no object")
    held = cast("dict[str, Any]", members)
    missing = [name for name in ("task_id", "stream_id", _STATUS) if name not in held]
    if missing:
        raise DamagedError(f"{unit} without {', '.join(missing)}")
    fields = tuple((n, _number(n, value)) for n, value in held.items() if n != _STATUS)
    status = held[_STATUS]
    words = cast("list[Any]", status) if isinstance(status, list) else [status]
    return Section(unit, fields, tuple(_number(_STATUS, word) for word in words) or (0,))


def _number(name: str, value: object) -> int:
    number = value
    if isinstance(value, str) and value.startswith("0x"):
        try:
            number = int(value, 16)
        except ValueError:
            number = None
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 1 << 64:
        shown = repr(value)[:40] if isinstance(value, str | int | float) else type(value).__name__
        raise DamagedError(f"{name} is {shown}, no number of 64 bits")
    return number
