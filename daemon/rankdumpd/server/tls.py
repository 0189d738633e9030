"""Certificate of a server, its key and its authorities, reloaded when their files change."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import grpc

from rankdump._core.caller_roles import parse_roles
from rankdump._core.certificate_files import (
    ReloadCallback,
    WatchedFiles,
    compute_fingerprint,
    ignore_reload,
    read_file,
    read_revoked_fingerprints,
)
from rankdump.errors import ConfigError
from rankdumpd.settings import TlsSettings

if TYPE_CHECKING:
    from cryptography import x509

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


class ServerCertificates:
    """Certificate of a server, its key and its authorities, from files that may change."""

    def __init__(self, settings: TlsSettings, on_reload: ReloadCallback = ignore_reload) -> None:
        """Read the files; ConfigError when they cannot be read, do not match or name no host."""
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
        """Return credentials for gRPC, which checks at every connection whether the files have
        changed.
        """
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), self._configuration, require_client_authentication=True
        )

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        now = self.read_material()
        return grpc.ssl_server_certificate_configuration([(now.key, now.certificate)], now.ca)


def check_key_pair(settings: TlsSettings) -> tuple[str, ...]:
    """Return the roles of a certificate; ConfigError when files cannot be read or do not match."""
    paths = [Path(each) for each in (settings.ca, settings.certificate, settings.key)]
    return read_alternative_names(_load_pair(paths, *map(read_file, paths))).roles


def check_server_files(settings: TlsSettings) -> None:
    """Raise the ConfigError that would prevent the start of a server for other hosts."""
    _read_material([Path(each) for each in (settings.ca, settings.certificate, settings.key)])
    if settings.revoked:
        read_revoked_fingerprints(Path(settings.revoked))


class AlternativeNames(NamedTuple):
    """Roles and hosts that the alternative names of a certificate contain."""

    roles: tuple[str, ...]
    hosts: tuple[str, ...]
    """Names and addresses of hosts."""


def read_alternative_names(certificate: x509.Certificate) -> AlternativeNames:
    """Return the roles and hosts of a certificate; ValueError when its alternative names cannot be
    read.
    """
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return AlternativeNames((), ())
    addresses = map(str, names.get_values_for_type(x509.IPAddress))
    return AlternativeNames(
        tuple(sorted(parse_roles(names.get_values_for_type(x509.UniformResourceIdentifier)))),
        (*names.get_values_for_type(x509.DNSName), *addresses),
    )


def _read_material(paths: Sequence[Path]) -> TlsMaterial:
    ca, certificate, key = map(read_file, paths)
    own = _load_pair(paths, ca, certificate, key)
    hosts = read_alternative_names(own).hosts
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
    # Imported only here, because a daemon without certificates does not need it.
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    try:
        x509.load_pem_x509_certificates(ca)
    except ValueError:
        raise ConfigError(str(paths[0]), "", "its content", "certificates, PEM") from None
    try:
        own = x509.load_pem_x509_certificates(certificate)[0]
        read_alternative_names(own)
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
