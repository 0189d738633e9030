"""Audit log: a file with one JSON line for each call that read or changed something. A full file is
renamed, and the oldest file is replaced.

A call never fails because of the file: lines that cannot be written are counted, reported once in
the log, and reported in the file when it can be written again.
"""

from __future__ import annotations

import datetime
import errno
import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from rankdump.errors import ConfigError
from rankdumpd.server.state_files import is_transient

MAX_AUDIT_BYTES = 16 << 20
"""Size in bytes at which a file is renamed and a new one begins."""
MAX_AUDIT_FILES = 5
"""Number of files: the current one, and `.1` to `.4` with earlier lines."""
_LOG_MODE = 0o640
_MAX_TEXT_CHARACTERS = 512

AuditCallback: TypeAlias = "Callable[[str, Mapping[str, object]], None]"
"""Function with the signature of `AuditLog.add`: it takes the name of an action and its fields."""

_logger = logging.getLogger(__name__)


def ignore_action(_what: str, _fields: Mapping[str, object]) -> None:
    """Do nothing; used in place of `AuditLog.add` if there is no audit log."""


class AuditLog:
    """A file that several threads and processes may append to."""

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.time,
        max_bytes: int = MAX_AUDIT_BYTES,
    ) -> None:
        """`clock` returns seconds since the epoch. ConfigError when the path can never
        be opened.
        """
        self._path, self._clock, self._max_bytes = path, clock, max_bytes
        self._lock = threading.Lock()
        self._descriptor = -1
        self._lost = 0
        try:
            self._descriptor = _open_log(path)
        except OSError as error:
            if not is_transient(error):
                allowed = f"a file that can be appended to ({error.strerror})"
                raise ConfigError("settings", "log.audit", str(path), allowed) from None

    @property
    def lost_lines(self) -> int:
        """Number of lines that could not be written and that the file does not report yet."""
        return self._lost

    def add(self, what: str, fields: Mapping[str, object]) -> None:
        """Append a line with the time, the action `what` and its fields; texts are cut at 512
        characters.
        """
        line = self._line(what, fields)
        with self._lock:
            if self._lost:
                line = self._line("lost", {"lines": self._lost}) + line
            try:
                self._write(line)
                self._lost = 0
            except OSError as error:
                self._lost += 1
                if self._lost == 1:
                    _logger.error("lines of the audit log %s are lost: %s", self._path, error)

    def add_reload(self, files: Sequence[Path]) -> None:
        """Append a line that says which files were reloaded."""
        self.add("reload", {"who": "local", "files": [str(each) for each in files]})

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        with self._lock:
            self._close()

    def _line(self, what: str, fields: Mapping[str, object]) -> bytes:
        now = datetime.datetime.fromtimestamp(self._clock(), datetime.timezone.utc)
        body = {"time": now.isoformat(timespec="microseconds"), "what": what}
        body |= {name: _truncate_text(value) for name, value in fields.items()}
        return json.dumps(body).encode() + b"\n"

    def _write(self, line: bytes) -> None:
        """Write a line as a whole or not at all."""
        self._lock_file()
        try:
            size = os.fstat(self._descriptor).st_size
            if size and size + len(line) > self._max_bytes:
                self._rotate()
                self._close()
                self._lock_file()
                size = os.fstat(self._descriptor).st_size
            if os.write(self._descriptor, line) != len(line):
                os.ftruncate(self._descriptor, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            if self._descriptor >= 0:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _lock_file(self) -> None:
        """Open and lock the file that is at the path now, because another process may have renamed
        it.
        """
        while True:
            if self._descriptor < 0:
                self._descriptor = _open_log(self._path)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            held = os.fstat(self._descriptor)
            try:
                there = self._path.lstat()
            except FileNotFoundError:
                there = None
            if there and (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino):
                return
            self._close()

    def _rotate(self) -> None:
        for number in range(MAX_AUDIT_FILES - 1, 0, -1):
            older = self._path if number == 1 else self._numbered(number - 1)
            if older.exists():
                older.replace(self._numbered(number))

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _open_log(path: Path) -> int:
    # O_NONBLOCK, because the path may be a pipe without a reader.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.open(path, flags, _LOG_MODE)


def _truncate_text(value: object) -> object:
    return value[:_MAX_TEXT_CHARACTERS] if isinstance(value, str) else value
