"""Elements of a record where they lie: in memory, or in a file until somebody needs them."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from rankdump.contract.errors import DamagedError

CORRUPTED = "corrupted"
"""Why elements are dropped that are not those which were sent."""


_KEPT_BYTES = 16 << 20


class _Kept(threading.local):
    """Memory of each thread that is used again: to touch new pages takes longer than to copy."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def room(self, length: int) -> memoryview:
        """Return so many bytes of it."""
        if len(self._memory) < length:
            self._memory = bytearray(length)
        return memoryview(self._memory)[:length]


_kept = _Kept()


class Descriptor:
    """An open file or folder, closed with the last reference to it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


@dataclass(frozen=True, slots=True)
class Beside:
    """Elements that stand in a file which another process may change, or cut short."""

    file: Descriptor
    at: int
    length: int

    def __len__(self) -> int:
        return self.length

    def load(self) -> memoryview:
        """Return them in memory of this process; DamagedError when the file ends before them.

        What is known of them is known of this copy: the file may change at any time. The copy
        lasts until this thread loads the next ones.
        """
        if self.length > _KEPT_BYTES:
            return read_at(self.file.number, self.at, self.length)
        return _read_into(_kept.room(self.length), self.file.number, self.at)


Elements = memoryview | Beside


def loaded(elements: Elements) -> memoryview:
    """Return elements in memory; DamagedError when they are there no more."""
    return elements if isinstance(elements, memoryview) else elements.load()


def _read_into(room: memoryview, descriptor: int, offset: int) -> memoryview:
    done = 0
    while done < len(room):
        count = os.preadv(descriptor, (room[done:],), offset + done)
        if not count:
            missing = len(room) - done
            raise DamagedError(f"a file ends {missing} bytes before {offset + len(room)}")
        done += count
    return room


def read_at(descriptor: int, offset: int, length: int) -> memoryview:
    """Return bytes of an open file; DamagedError when it is too short.

    Reading ends there; touching mapped memory behind the end of a file would end the process.
    """
    data = os.pread(descriptor, length, offset)
    while len(data) < length:
        more = os.pread(descriptor, length - len(data), offset + len(data))
        if not more:
            missing = length - len(data)
            raise DamagedError(f"a file ends {missing} bytes before {offset + length}")
        data += more
    return memoryview(data)
