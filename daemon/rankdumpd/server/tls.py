"""Certificates of a server and the list of revoked ones, reloaded when their files change."""

from __future__ import annotations

import datetime
import hashlib
import logging
import re
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import grpc

from rankdump.errors import ConfigError
from rankdumpd.server.callers import parse_roles
from rankdumpd.settings import TlsSettings

if TYPE_CHECKING:
    from cryptography import x509

WatchedValue = TypeVar("WatchedValue")
ReloadCallback = Callable[[Sequence[Path]], None]

_FINGERPRINT = re.compile(r"[0-9a-f]{64}")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """Certificate and key of a server, and the authorities that it trusts."""

    ca: bytes
    certificate: bytes
    key: bytes
    fingerprint: str
    hosts: tuple[str, ...]
    """Host names and addresses in the certificate."""
    expires_s: float
    """End of validity, in seconds since the epoch."""


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


class ServerCertificates:
    """Certificate of a server, its key and its authorities, from files that may change."""

    def __init__(self, settings: TlsSettings, on_reload: ReloadCallback = ignore_reload) -> None:
        """ConfigError when the files cannot be read, do not match or name no host."""
        paths = [Path(each) for each in (settings.ca, settings.certificate, settings.key)]
        self._material = WatchedFiles(paths, _read_material, on_reload)
        left_s = self.read_material().expires_s - datetime.datetime.now().timestamp()
        if left_s < 0:
            _logger.error(
                "the certificate %s has expired: no client trusts it", settings.certificate
            )

    def read_material(self) -> TlsMaterial:
        """Return the content of the files as they are now."""
        return self._material.get()

    def build_server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for gRPC, which checks for changed files at every connection."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), self._configuration, require_client_authentication=True
        )

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        now = self.read_material()
        return grpc.ssl_server_certificate_configuration([(now.key, now.certificate)], now.ca)


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


def check_key_pair(settings: TlsSettings) -> tuple[str, ...]:
    """Return the roles of a certificate; ConfigError when files cannot be read or do not match."""
    from cryptography import x509

    paths = [Path(each) for each in (settings.ca, settings.certificate, settings.key)]
    own = _load_pair(paths, *map(_read_pem, paths))
    try:
        names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    return tuple(sorted(parse_roles(uris)))


def compute_fingerprint(pem: bytes) -> str:
    """Return the SHA-256 of a certificate's DER form, as openssl prints it without its colons."""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem.decode())).hexdigest()


def read_revoked_fingerprints(path: Path) -> frozenset[str]:
    """Return the fingerprints of a file: the first word of each line that is not a comment.

    ConfigError names the line at fault.
    """
    found: set[str] = set()
    for number, line in enumerate(_read_pem(path).decode(errors="replace").splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            digits = words[0].replace(":", "").lower()
            if not _FINGERPRINT.fullmatch(digits):
                allowed = "the SHA-256 fingerprint of a certificate, 64 hexadecimal digits"
                raise ConfigError(str(path), f"line {number}", words[0][:100], allowed)
            found.add(digits)
    return frozenset(found)


def _read_material(paths: Sequence[Path]) -> TlsMaterial:
    ca, certificate, key = map(_read_pem, paths)
    own = _load_pair(paths, ca, certificate, key)
    hosts = _list_hosts(own)
    if not hosts:
        allowed = "a certificate that names its hosts (rankdumpd certs issue --host)"
        raise ConfigError(str(paths[1]), "", "this certificate", allowed)
    fingerprint = compute_fingerprint(certificate)
    expires_s = own.not_valid_after_utc.timestamp()
    return TlsMaterial(ca, certificate, key, fingerprint, hosts, expires_s)


def _load_pair(
    paths: Sequence[Path], ca: bytes, certificate: bytes, key: bytes
) -> x509.Certificate:
    """Return the server's certificate; ConfigError when the files do not match each other."""
    # Imported here, because a daemon without certificates does not need it.
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    try:
        x509.load_pem_x509_certificates(ca)
    except ValueError:
        raise ConfigError(str(paths[0]), "", "its content", "certificates, PEM") from None
    try:
        own = x509.load_pem_x509_certificates(certificate)[0]
        _list_hosts(own)
    except ValueError:
        raise ConfigError(str(paths[1]), "", "its content", "a certificate, PEM") from None
    try:
        private = serialization.load_pem_private_key(key, None)
    except (ValueError, TypeError):
        allowed = "a private key without a passphrase, PEM"
        raise ConfigError(str(paths[2]), "", "its content", allowed) from None
    if private.public_key() != own.public_key():
        raise ConfigError(str(paths[2]), "", "this key", f"the key of {paths[1]}")
    return own


def _list_hosts(certificate: x509.Certificate) -> tuple[str, ...]:
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    addresses = map(str, names.get_values_for_type(x509.IPAddress))
    return (*names.get_values_for_type(x509.DNSName), *addresses)


def _read_pem(path: Path) -> bytes:
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
