"""The rank's side of a slab, by hand; as a program it stages frames and waits to be killed."""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import time
from pathlib import Path

import xxhash

from rankdump._shm.slab_format import RING_OFFSET
from rankdump._shm.slab_ring import SlabWriter

WAIT_S = 300


class SlabSide:
    """A mapped slab with its lock."""

    def __init__(self, path: str, length: int) -> None:
        self.descriptor = os.open(path, os.O_RDWR)
        self.memory = memoryview(mmap.mmap(self.descriptor, length))
        fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.writer = SlabWriter(self.memory)

    def put(
        self,
        frame: bytes,
        data: bytes = b"",
        *,
        whole: bool = True,
        sequence: int = 0,
        mark: int = 0,
    ) -> int:
        """Publish one entry as soon as there is space; return the position behind it."""
        deadline = time.monotonic() + WAIT_S
        while (room := self.writer.reserve(frame, len(data), sequence=sequence, mark=mark)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no room after {self.writer.written}")
            time.sleep(0.001)
        if whole:
            room.data[:] = data
            self.writer.commit(room)
        else:
            self.writer.commit(room, whole=False)
        return self.writer.written

    def begin(self, frame: bytes, data_bytes: int) -> None:
        """Reserve an entry that will never be finished."""
        if self.writer.reserve(frame, data_bytes) is None:
            raise TimeoutError("no room")

    def seal(self) -> int:
        """Seal what was published, as a sender does; return the position behind it."""
        self.writer.seal(self.writer.written, lambda _, data: xxhash.xxh3_128_digest(data))
        return self.writer.written

    def flip(self, at: int) -> None:
        """Change one bit of the ring."""
        self.memory[RING_OFFSET + at] ^= 1

    def unlock(self) -> None:
        """Give the lock up: any descriptor of the file would do."""
        fcntl.lockf(self.descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)


def main() -> None:
    """Stage entries read from a folder, in the order of their names, and say so.

    A file holds a frame; beside it stand its data, or `.torn` with their length.
    """
    path, length, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    side = SlabSide(path, length)
    for frame in sorted(folder.glob("*.frame")):
        data, torn = frame.with_suffix(".data"), frame.with_suffix(".torn")
        if torn.exists():
            side.begin(frame.read_bytes(), int(torn.read_text()))
        else:
            side.put(frame.read_bytes(), data.read_bytes() if data.exists() else b"")
    print("staged", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
