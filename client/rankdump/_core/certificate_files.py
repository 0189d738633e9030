"""Files of certificates, which are read again when they change; fingerprints of certificates; and
the list of revoked certificates.
"""

from __future__ import annotations

import hashlib
import logging
import re
import ssl
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from rankdump.errors import ConfigError

_logger = logging.getLogger(__name__)

WatchedValue = TypeVar("WatchedValue")
ReloadCallback = Callable[[Sequence[Path]], None]


def ignore_reload(_files: Sequence[Path]) -> None:
    """Do nothing; the default of `on_reload`."""


class WatchedFiles(Generic[WatchedValue]):
    """A value read from files, and read again when they change; a failed reload keeps the old
    value.

    Safe to use from several threads. ConfigError if the first read fails.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        read: Callable[[Sequence[Path]], WatchedValue],
        on_reload: ReloadCallback = ignore_reload,
    ) -> None:
        """`on_reload` is called with the files after each reload."""
        self._paths, self._read, self._on_reload = paths, read, on_reload
        self._lock = threading.Lock()
        self._seen = self._signature()
        self._value = read(paths)

    def get(self) -> WatchedValue:
        """Return the value of the files as they are now, or the last value that could be read."""
        with self._lock:
            seen = self._signature()
            if seen != self._seen:
                self._seen = seen
                try:
                    self._value = self._read(self._paths)
                    _logger.info("reloaded the files %s", ", ".join(map(str, self._paths)))
                    self._on_reload(self._paths)
                except ConfigError as error:
                    # Perhaps only one of several files has been replaced so far; their next change
                    # is read again.
                    _logger.error(
                        "changed files cannot be used; their earlier content stays in use: %s",
                        error,
                    )
            return self._value

    def _signature(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(map(_read_signature, self._paths))


def read_file(path: Path) -> bytes:
    """Return the content of a file; ConfigError if it cannot be read."""
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


_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


class RevokedCertificates:
    """The fingerprints of revoked certificates in a file, which is read again when it changes."""

    def __init__(self, path: Path, on_reload: ReloadCallback = ignore_reload) -> None:
        """ConfigError if the file cannot be read or a line is not a fingerprint."""
        self._listed = WatchedFiles(
            [path], lambda paths: read_revoked_fingerprints(paths[0]), on_reload
        )

    def read_fingerprints(self) -> frozenset[str]:
        """Return the fingerprints that the file has now."""
        return self._listed.get()


def compute_fingerprint(pem: bytes) -> str:
    """Return the SHA-256 of a certificate's DER form, as openssl prints it but without colons."""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem.decode())).hexdigest()


def read_revoked_fingerprints(path: Path) -> frozenset[str]:
    """Return the fingerprints in a file: the first word of each line that is not a comment.

    ConfigError names the line that is wrong.
    """
    found: set[str] = set()
    for number, line in enumerate(read_file(path).decode(errors="replace").splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            digits = words[0].replace(":", "").lower()
            if not _FINGERPRINT.fullmatch(digits):
                allowed = "the SHA-256 fingerprint of a certificate, 64 hexadecimal digits"
                raise ConfigError(str(path), f"line {number}", words[0][:100], allowed)
            found.add(digits)
    return frozenset(found)
