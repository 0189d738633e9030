"""Room on small disks, taken and given back: real tmpfs mounts, filled to the last byte or file."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from pathlib import Path

_BLOCK = 1 << 20
_LEAST = 4096


def mount(folder: Path, *, size_bytes: int, inodes: int) -> None:
    """Mount a tmpfs; only within a mount namespace of one's own."""
    folder.mkdir(parents=True, exist_ok=True)
    options = f"size={size_bytes},nr_inodes={inodes},mode=0755"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "rig", str(folder)], check=True)


class Ballast:
    """What takes the room of one disk."""

    def __init__(self, disk: Path) -> None:
        self._disk = disk
        self._bytes = disk / ".ballast"
        self._files = disk / ".ballast.d"

    def fill_bytes(self) -> bool:
        """Take every byte; return whether the disk refuses more."""
        opened = os.open(self._bytes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            block = _BLOCK
            with contextlib.suppress(FileNotFoundError):
                free = os.statvfs(self._disk)
                with contextlib.suppress(OSError):
                    os.posix_fallocate(opened, 0, free.f_bavail * free.f_frsize)
            while block >= _LEAST:
                try:
                    os.write(opened, bytes(block))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    block //= 16
            return True
        finally:
            os.close(opened)

    def fill_inodes(self) -> bool:
        """Take every file the disk can hold; return whether it refuses one more."""
        self._files.mkdir(exist_ok=True)
        number = 0
        while True:
            try:
                os.close(os.open(self._files / str(number), os.O_WRONLY | os.O_CREAT, 0o600))
            except OSError as error:
                return error.errno == errno.ENOSPC
            number += 1

    def give_back(self) -> None:
        """Give everything back."""
        self._bytes.unlink(missing_ok=True)
        if self._files.is_dir():
            for each in self._files.iterdir():
                each.unlink()
            self._files.rmdir()
