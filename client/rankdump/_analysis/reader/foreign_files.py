"""Files that other tools wrote, one for each rank, in a folder or below folders of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from rankdump._analysis.reader.file_errors import named_errors

_MAX_START_BYTES = 4096
_MAX_LISTED = 1 << 16
"""Files of a folder that are looked at: a folder with more of them is no dump of these tools."""
_SUFFIXES = ("", ".json", ".log", ".txt", ".pkl", ".pickle")
"""Of files that are opened; tensors of other dumps are not."""


def find_marked_files(root: Path, is_wanted: Callable[[bytes], bool]) -> Iterator[Path]:
    """Yield the root, or the files in it and one folder below, that begin as is wanted, by name."""
    if root.is_file():
        yield from (path for path in (root,) if is_wanted(read_start(path)))
        return
    for item in _list_items(root):
        for path in _list_items(item) if item.is_dir() else (item,):
            if path.suffix in _SUFFIXES and path.is_file() and is_wanted(read_start(path)):
                yield path


def read_foreign_file(path: Path) -> bytes:
    """Return the bytes of a file; CorruptedError when it cannot be read."""
    with named_errors(path):
        return path.read_bytes()


def _list_items(folder: Path) -> list[Path]:
    try:
        items = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:
        return []
    return items[:_MAX_LISTED]


def read_start(path: Path) -> bytes:
    """Return the first bytes of a file; none where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_MAX_START_BYTES)
    except OSError:
        return b""
