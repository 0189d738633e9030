"""Small disks of a run: tmpfs mounts that a remount shrinks and restores.

A tmpfs can be shrunk to its content at any time, instantly and regardless of its size.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

_PAGE_BYTES = 4096
_TRIES = 20


class ShrinkableDisk:
    """One tmpfs; works only in a private mount namespace."""

    def __init__(self, folder: Path, *, size_bytes: int, inodes: int) -> None:
        self._folder = folder
        self._whole = {"size": size_bytes, "nr_inodes": inodes}

    def mount(self) -> None:
        """Mount it, empty."""
        self._folder.mkdir(parents=True, exist_ok=True)
        options = ",".join(f"{key}={value}" for key, value in self._whole.items())
        command = ["mount", "-t", "tmpfs", "-o", f"{options},mode=0755", "rig", str(self._folder)]
        subprocess.run(command, check=True)

    def take_bytes(self) -> bool:
        """Leave no byte; return whether that was possible."""
        return self._shrink(lambda room: {"size": (room.f_blocks - room.f_bfree) * room.f_frsize})

    def take_inodes(self) -> bool:
        """Leave no inode; return whether that was possible."""
        return self._shrink(lambda room: {"nr_inodes": room.f_files - room.f_ffree})

    def give_back(self) -> None:
        """Restore the full size."""
        if not self._remount(self._whole):
            raise OSError(f"{self._folder} cannot be restored to its full size")

    def _shrink(self, least: Callable[[os.statvfs_result], dict[str, int]]) -> bool:
        # More may be written meanwhile than the computed size.
        for _ in range(_TRIES):
            wanted = least(os.statvfs(self._folder))
            if self._remount({key: max(value, _PAGE_BYTES if key == "size" else 1)
                              for key, value in wanted.items()}):  # fmt: skip
                return True
        return False

    def _remount(self, limits: dict[str, int]) -> bool:
        options = ",".join(f"{key}={value}" for key, value in limits.items())
        command = ["mount", "-o", f"remount,{options}", str(self._folder)]
        return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0
