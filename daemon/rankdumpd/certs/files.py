"""The folder of an authority: what stands in it, and that nothing in it is ever overwritten."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from rankdump.contract.errors import ConfigError, UnavailableError
from rankdumpd.certs.authority import Described, Issued, described

AUTHORITY = "ca"
REVOKED = "revoked"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY_MODE, _OPEN_MODE, _FOLDER_MODE = 0o600, 0o644, 0o700
_HEADER = b"# Certificates that are believed no more: SHA-256 fingerprint and name.\n"


class Store:
    """The files of an authority: `ca.pem`, `NAME.pem`, a `.key` beside each, and `revoked`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def revoked(self) -> Path:
        """The list of certificates that are believed no more."""
        return self.folder / REVOKED

    def certificate(self, name: str = AUTHORITY) -> Path:
        """Return where a certificate stands."""
        return self.folder / f"{name}.pem"

    def key(self, name: str = AUTHORITY) -> Path:
        """Return where its private key stands."""
        return self.folder / f"{name}.key"

    def begin(self) -> None:
        """Make the folder, for its owner alone; ConfigError when it is there and is not."""
        try:
            self.folder.mkdir(mode=_FOLDER_MODE, parents=True)
        except FileExistsError:
            if not self.folder.is_dir() or stat.S_IMODE(self.folder.stat().st_mode) & 0o077:
                allowed = "a new folder, or one that is its owner's alone (mode 0700)"
                raise ConfigError(str(self.folder), "", "this folder", allowed) from None
        except OSError as error:
            raise _failed(self.folder, error) from None

    def add(self, name: str, issued: Issued) -> None:
        """Write a certificate and its key; ConfigError when there is one of that name."""
        if self.certificate(name).exists() or self.key(name).exists():
            raise ConfigError(str(self.folder), name, "there already", "a name that is free")
        # The key first: a certificate without its key would look whole.
        _make(self.key(name), issued.key, _KEY_MODE)
        _make(self.certificate(name), issued.certificate, _OPEN_MODE)

    def begin_revoked(self) -> None:
        """Write an empty list."""
        with contextlib.suppress(ConfigError):  # it is there
            _make(self.revoked, _HEADER, _OPEN_MODE)

    def authority(self) -> Issued:
        """Return the authority; ConfigError when the folder has none."""
        self.check()
        return Issued(_read(self.certificate()), _read(self.key()))

    def check(self) -> None:
        """ConfigError when the folder has no authority."""
        if not self.certificate().exists():
            allowed = f"a folder that rankdumpd certs init {self.folder} made"
            raise ConfigError(str(self.folder), "", "without an authority", allowed)

    def find(self, name: str) -> Described:
        """Return what a certificate says; ConfigError names those there are."""
        if not self.certificate(name).exists():
            there = ", ".join(found for found, _ in self.all()) or "none, as none was issued"
            raise ConfigError(str(self.folder), "", name, there)
        return described(_read(self.certificate(name)))

    def all(self) -> Iterator[tuple[str, Described]]:
        """Yield every certificate but the authority's, with the name of its file."""
        for path in sorted(self.folder.glob("*.pem")):
            if path.stem != AUTHORITY:
                yield path.stem, described(_read(path))

    def revoke(self, fingerprint: str, name: str) -> None:
        """Add a line to the list of what is believed no more."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            descriptor = os.open(self.revoked, flags, _OPEN_MODE)
            with os.fdopen(descriptor, "ab") as file:
                file.write(f"{fingerprint} # {name}\n".encode())
        except OSError as error:
            raise _failed(self.revoked, error) from None


def checked_name(name: str) -> str:
    """Return a name that can be that of a file; ConfigError when it cannot."""
    if name in (AUTHORITY, REVOKED) or not _NAME.fullmatch(name):
        allowed = f'up to 64 letters, digits, ".", "_" and "-", other than {AUTHORITY}, {REVOKED}'
        raise ConfigError("--name", "", name, allowed)
    return name


def _make(path: Path, content: bytes, mode: int) -> None:
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        raise ConfigError(str(path), "", "there already", "a name that is free") from None
    except OSError as error:
        raise _failed(path, error) from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _failed(path, error) from None


def _failed(path: Path, error: OSError) -> UnavailableError:
    return UnavailableError(f"{path}: {error.strerror}")
