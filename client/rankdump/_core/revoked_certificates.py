"""Fingerprints of certificates, and the list of those that are revoked."""

from __future__ import annotations

import hashlib
import re
import ssl
from pathlib import Path

from rankdump._core.watched_files import ReloadCallback, WatchedFiles, ignore_reload, read_file
from rankdump.errors import ConfigError

_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


class RevokedCertificates:
    """Fingerprints of revoked certificates."""

    def __init__(self, path: Path, on_reload: ReloadCallback = ignore_reload) -> None:
        """ConfigError when the file cannot be read, or a line is not a fingerprint."""
        self._listed = WatchedFiles(
            [path], lambda paths: read_revoked_fingerprints(paths[0]), on_reload
        )

    def read_fingerprints(self) -> frozenset[str]:
        """Return the fingerprints in the file as it is now."""
        return self._listed.get()


def compute_fingerprint(pem: bytes) -> str:
    """Return the SHA-256 of a certificate's DER form, as openssl prints it without its colons."""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem.decode())).hexdigest()


def read_revoked_fingerprints(path: Path) -> frozenset[str]:
    """Return the fingerprints of a file: the first word of each line that is not a comment.

    ConfigError names the line at fault.
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
