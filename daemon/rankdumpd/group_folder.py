"""Folders that a group may enter and others may not, whatever the umask is."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER_MODE = 0o750
"""Of the folder of a socket: its group may enter, and others may not."""
_PRIVATE_MODE = 0o700


def make_folder(path: Path, group: int, mode: int = FOLDER_MODE) -> None:
    """Make a folder that a group may enter; one that is there stays as it is."""
    missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
    for folder in reversed(missing):
        folder.mkdir(_PRIVATE_MODE, exist_ok=True)
        os.chown(folder, -1, group if folder == path else -1)
        # Whatever the umask is: the socket's folder may be among them.
        folder.chmod(mode if folder == path else FOLDER_MODE)
