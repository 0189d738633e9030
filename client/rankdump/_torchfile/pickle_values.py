"""Plain values of a pickle, read without unpickling: nothing is imported, and no object is created
except numbers, texts, lists, tuples and dictionaries. Pure.

The opcodes are interpreted one by one (Python's pickletools, protocols 0 to 5). A name in the
pickle (GLOBAL) becomes a `PickledName`, a call (REDUCE) of a name that the caller allows a
`PickledCall`, and a reference to data outside of the pickle (BINPERSID) a `PickledReference`. Any
other name, and any opcode that creates objects, is an error. Each opcode takes at least one byte
and adds at most one value, so the memory is proportional to the size of the pickle.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, cast

from rankdump.errors import CorruptedError, UnsupportedError

_MAX_INTEGER_BYTES = 16
_HIGHEST_PROTOCOL = 5
_MARK: Any = object()
_SIZED = {"<B": 1, "<H": 2, "<i": 4, "<I": 4, "<Q": 8, ">d": 8}
_SHOWN_CHARACTERS = 80


class PickledName(NamedTuple):
    """Name of an object of a module in a pickle, such as `torch.FloatStorage`; nothing
    is imported.
    """

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class PickledCall(NamedTuple):
    """A call that the pickle requests; the call is not made."""

    name: PickledName
    arguments: tuple[Any, ...]


class PickledReference(NamedTuple):
    """Reference of the pickle to data outside of it."""

    content: Any


def read_pickle_values(data: bytes, allowed: Collection[str] = ()) -> Any:
    """Return the value of a pickle; names and calls in it must be among those in `allowed`.

    CorruptedError for a damaged pickle, UnsupportedError for a pickle with other names or with more
    than plain values. The content of containers is not checked.
    """
    machine = _PickleMachine(data, frozenset(allowed))
    try:
        return machine.run()
    except (IndexError, struct.error):
        raise CorruptedError(f"the pickle is damaged at byte {machine.position}") from None
    except UnicodeDecodeError:
        raise CorruptedError(
            f"a text in the pickle is not UTF-8, byte {machine.position}"
        ) from None


class _PickleMachine:
    """Stack and memory of the interpreter of one pickle."""

    def __init__(self, data: bytes, allowed: frozenset[str]) -> None:
        self.position = 0
        self._data, self._allowed = data, allowed
        self._stack: list[Any] = []
        self._memory: dict[int, Any] = {}

    def run(self) -> Any:
        """Interpret the pickle; return its value."""
        data = self._data
        while True:
            at = self.position
            code = data[at : at + 1]
            self.position += 1
            if code == b".":
                return self._finish()
            step = _STEPS.get(code)
            if step is None:
                if not code:
                    raise CorruptedError("the pickle has no end")
                raise UnsupportedError(
                    f"the pickle has opcode {code!r} at byte {at}, "
                    "but only plain values are read, never objects"
                )
            step(self)

    def push(self, value: Any) -> None:
        """Add a value to the stack."""
        self._stack.append(value)

    def pop(self) -> Any:
        """Remove and return the last value of the stack."""
        value = self._stack.pop()
        if value is _MARK:
            raise CorruptedError(f"the pickle is damaged at byte {self.position}")
        return value

    def pop_to_mark(self) -> list[Any]:
        """Remove the last mark and the values after it; return these values."""
        at = len(self._stack) - 1
        while self._stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise IndexError
        values = self._stack[at + 1 :]
        del self._stack[at:]
        return values

    def number(self, form: str) -> Any:
        """Read the next number of the pickle."""
        return struct.unpack(form, self.take(_SIZED[form]))[0]

    def take(self, count: int) -> bytes:
        """Read the next `count` bytes of the pickle."""
        found = self._data[self.position : self.position + count]
        if len(found) != count:
            raise IndexError
        self.position += count
        return found

    def take_line(self) -> str:
        """Read the text up to the end of the line."""
        end = self._data.find(b"\n", self.position)
        if end < 0:
            raise IndexError
        line = self.take(end - self.position)
        self.position += 1
        return line.decode()

    def remember(self, number: int) -> None:
        """Store the last value of the stack under a number."""
        if self._stack[-1] is _MARK:
            raise IndexError
        self._memory[number] = self._stack[-1]

    def recall(self, number: int) -> None:
        """Add a stored value to the stack."""
        if number not in self._memory:
            raise IndexError
        self.push(self._memory[number])

    @property
    def remembered(self) -> int:
        """Number of stored values."""
        return len(self._memory)

    def extend_list(self, values: list[Any]) -> None:
        """Add values to the list at the top of the stack."""
        self._find_container(list).extend(values)

    def set_items(self, values: list[Any]) -> None:
        """Add keys and values to the dictionary at the top of the stack."""
        found = self._find_container(dict)
        if len(values) % 2:
            raise IndexError
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str):
                raise UnsupportedError(
                    f"a key in the pickle is of {type(key).__name__}, not a text"
                )
            found[key] = value

    def name(self, module: Any, name: Any) -> None:
        """Add a name to the stack."""
        found = PickledName(module, name)
        if not isinstance(module, str) or not isinstance(name, str):
            raise IndexError
        if str(found) not in self._allowed:
            raise UnsupportedError(
                f"the pickle names {str(found)[:_SHOWN_CHARACTERS]}, which is not read: "
                "nothing in it is imported or called"
            )
        self.push(found)

    def call(self) -> None:
        """Replace a name and its arguments on the stack by a call."""
        arguments, name = self.pop(), self.pop()
        if not isinstance(name, PickledName) or type(arguments) is not tuple:
            raise IndexError
        # An OrderedDict becomes a plain dictionary, which keeps the order too.
        is_dict = str(name) == "collections.OrderedDict" and not arguments
        self.push({} if is_dict else PickledCall(name, cast("tuple[Any, ...]", arguments)))

    def _find_container(self, kind: type) -> Any:
        found = self._stack[-1]
        if type(found) is not kind:
            raise IndexError
        return found

    def _finish(self) -> Any:
        if len(self._stack) != 1 or self._stack[0] is _MARK:
            raise IndexError
        return self._stack[0]


def _read_protocol(machine: _PickleMachine) -> None:
    protocol = machine.number("<B")
    if protocol > _HIGHEST_PROTOCOL:
        raise UnsupportedError(
            f"the pickle has protocol {protocol}; read are those up to {_HIGHEST_PROTOCOL}"
        )


def _read_integer(machine: _PickleMachine, form: str) -> None:
    size = machine.number(form)
    if not 0 <= size <= _MAX_INTEGER_BYTES:
        raise UnsupportedError(
            f"the pickle has an integer of {size} bytes; at most {_MAX_INTEGER_BYTES} are read"
        )
    machine.push(int.from_bytes(machine.take(size), "little", signed=True))


def _read_text(machine: _PickleMachine, form: str) -> None:
    machine.push(machine.take(machine.number(form)).decode("utf-8", "surrogatepass"))


def _push_tuple(machine: _PickleMachine, size: int) -> None:
    values = [machine.pop() for _ in range(size)]
    machine.push(tuple(values[::-1]))


def _append(machine: _PickleMachine) -> None:
    value = machine.pop()
    machine.extend_list([value])


def _set_item(machine: _PickleMachine) -> None:
    value, key = machine.pop(), machine.pop()
    machine.set_items([key, value])


def _drop_state(machine: _PickleMachine) -> None:
    """Drop the attributes of a dictionary, such as the versions of modules in a `state_dict`."""
    machine.pop()
    machine.set_items([])


def _name_from_stack(machine: _PickleMachine) -> None:
    name, module = machine.pop(), machine.pop()
    machine.name(module, name)


def _refer(machine: _PickleMachine) -> None:
    machine.push(PickledReference(machine.pop()))


def _copy_last(machine: _PickleMachine) -> None:
    value = machine.pop()
    machine.push(value)
    machine.push(value)


_STEPS: Mapping[bytes, Callable[[_PickleMachine], object]] = {
    b"\x80": _read_protocol,
    b"\x95": lambda m: m.number("<Q"),
    b"(": lambda m: m.push(_MARK),
    b"0": lambda m: m.pop(),
    b"2": _copy_last,
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"K": lambda m: m.push(m.number("<B")),
    b"M": lambda m: m.push(m.number("<H")),
    b"J": lambda m: m.push(m.number("<i")),
    b"\x8a": lambda m: _read_integer(m, "<B"),
    b"\x8b": lambda m: _read_integer(m, "<i"),
    b"G": lambda m: m.push(m.number(">d")),
    b"X": lambda m: _read_text(m, "<I"),
    b"\x8c": lambda m: _read_text(m, "<B"),
    b"\x8d": lambda m: _read_text(m, "<Q"),
    b"}": lambda m: m.push({}),
    b"]": lambda m: m.push([]),
    b")": lambda m: m.push(()),
    b"t": lambda m: m.push(tuple(m.pop_to_mark())),
    b"\x85": lambda m: _push_tuple(m, 1),
    b"\x86": lambda m: _push_tuple(m, 2),
    b"\x87": lambda m: _push_tuple(m, 3),
    b"a": _append,
    b"e": lambda m: m.extend_list(m.pop_to_mark()),
    b"s": _set_item,
    b"u": lambda m: m.set_items(m.pop_to_mark()),
    b"q": lambda m: m.remember(m.number("<B")),
    b"r": lambda m: m.remember(m.number("<I")),
    b"\x94": lambda m: m.remember(m.remembered),
    b"h": lambda m: m.recall(m.number("<B")),
    b"j": lambda m: m.recall(m.number("<I")),
    b"c": lambda m: m.name(m.take_line(), m.take_line()),
    b"\x93": _name_from_stack,
    b"R": lambda m: m.call(),
    b"b": _drop_state,
    b"Q": _refer,
}
"""Action of each opcode; all other opcodes are rejected."""
