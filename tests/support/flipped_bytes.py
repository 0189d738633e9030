"""Files with one byte changed, and restored afterwards."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def flipped(path: Path, at: int, mask: int) -> Generator[None]:
    """Change some bits of a byte for a while."""
    before, mode = path.read_bytes(), path.stat().st_mode
    path.chmod(0o600)
    path.write_bytes(before[:at] + bytes([before[at] ^ mask]) + before[at + 1 :])
    try:
        yield
    finally:
        path.write_bytes(before)
        path.chmod(mode)
