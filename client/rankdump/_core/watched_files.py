"""Values that are read from files, and again when the files change."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from rankdump.errors import ConfigError

WatchedValue = TypeVar("WatchedValue")
ReloadCallback = Callable[[Sequence[Path]], None]

_logger = logging.getLogger(__name__)


def ignore_reload(_files: Sequence[Path]) -> None:
    """Callback that does nothing."""


class WatchedFiles(Generic[WatchedValue]):
    """A value read from files, and again when they change; a failed reload keeps the old value.

    Safe to use from several threads. ConfigError when the first read fails.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        read: Callable[[Sequence[Path]], WatchedValue],
        on_reload: ReloadCallback = ignore_reload,
    ) -> None:
        """Call `on_reload` with the files after each reload."""
        self._paths, self._read, self._on_reload = paths, read, on_reload
        self._lock = threading.Lock()
        self._seen = self._signature()
        self._value = read(paths)

    def get(self) -> WatchedValue:
        """Return the current value, or the last one that could be read."""
        with self._lock:
            seen = self._signature()
            if seen != self._seen:
                self._seen = seen
                try:
                    self._value = self._read(self._paths)
                    _logger.info("reloaded the files %s", ", ".join(map(str, self._paths)))
                    self._on_reload(self._paths)
                except ConfigError as error:
                    # Perhaps only one of the files was replaced so far; later changes are read too.
                    _logger.error(
                        "changed files cannot be used; their earlier content stays in use: %s",
                        error,
                    )
            return self._value

    def _signature(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(map(_read_signature, self._paths))


def read_file(path: Path) -> bytes:
    """Return the content of a file; ConfigError when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(str(path), "", error.strerror, "a file that can be read") from None


def _read_signature(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
