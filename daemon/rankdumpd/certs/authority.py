"""Certificates and the folder that stores them: P-256 keys and SHA-256 signatures, one authority,
its certificates and the list of revoked ones. Nothing in the folder is ever overwritten.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rankdump._core.caller_roles import ROLE_URI
from rankdump._core.certificate_files import compute_fingerprint
from rankdump.errors import ConfigError, CorruptedError, UnavailableError
from rankdumpd.server.tls import read_alternative_names

AUTHORITY_DAYS = 3650
# A new certificate is valid from some minutes before now, because clocks of hosts differ and it
# must be valid on all hosts at once.
_BEFORE = datetime.timedelta(minutes=5)
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_DNS_NAME = re.compile(rf"(\*\.)?{_LABEL}(\.{_LABEL})*")


@dataclass(frozen=True, slots=True)
class IssuedCertificate:
    """A certificate and its private key, PEM."""

    certificate: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class CertificateDescription:
    """Name, roles, hosts, end of validity and fingerprint of a certificate."""

    name: str
    roles: tuple[str, ...]
    hosts: tuple[str, ...]
    expires: datetime.datetime
    fingerprint: str


def create_authority(name: str, *, now: datetime.datetime) -> IssuedCertificate:
    """Return an authority, valid for ten years, that may sign certificates but no other
    authorities.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _start_builder(name, _build_name(name), key.public_key(), now, AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_build_key_usage(signs=True), critical=True)
    return IssuedCertificate(
        _encode_certificate(builder.sign(key, hashes.SHA256())), _encode_private_key(key)
    )


def issue_certificate(
    authority: IssuedCertificate,
    *,
    name: str,
    roles: Sequence[str],
    hosts: Sequence[str],
    days: int,
    now: datetime.datetime,
) -> IssuedCertificate:
    """Return a certificate for a caller with these roles; if `hosts` are given, also for a server
    on these hosts.
    """
    parent, parent_key = _load_certificate(authority.certificate), _load_private_key(authority.key)
    key = ec.generate_private_key(ec.SECP256R1())
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if hosts:
        # A certificate without hosts cannot be used by a server.
        uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
    names = [x509.UniformResourceIdentifier(ROLE_URI + role) for role in roles]
    builder = _start_builder(name, parent.subject, key.public_key(), now, days)
    for extension, critical in (
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_build_key_usage(signs=False), True),
        (x509.ExtendedKeyUsage(uses), False),
        (x509.SubjectAlternativeName([*names, *map(_parse_host, hosts)]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(parent_key.public_key()), False),
    ):
        builder = builder.add_extension(extension, critical)
    return IssuedCertificate(
        _encode_certificate(builder.sign(parent_key, hashes.SHA256())), _encode_private_key(key)
    )


def describe_certificate(certificate: bytes) -> CertificateDescription:
    """Return the description of a certificate; CorruptedError when it is not one."""
    found = _load_certificate(certificate)
    names = read_alternative_names(found)
    common = found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return CertificateDescription(
        str(common[0].value) if common else "",
        names.roles,
        names.hosts,
        found.not_valid_after_utc,
        compute_fingerprint(certificate),
    )


def _start_builder(
    name: str,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: datetime.datetime,
    days: int,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_build_name(name))
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _build_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _build_key_usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _parse_host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if len(host) > 253 or not _DNS_NAME.fullmatch(host):
            raise ConfigError("--host", "", host, "a host's name or IP address") from None
        return x509.DNSName(host)


def _load_certificate(certificate: bytes) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(certificate)
    except ValueError as error:
        raise CorruptedError(f"the file is not a certificate: {error}") from None


def _load_private_key(key: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        found = serialization.load_pem_private_key(key, None)
    except (ValueError, TypeError) as error:
        raise CorruptedError(f"the file is not a private key: {error}") from None
    if not isinstance(found, ec.EllipticCurvePrivateKey):
        raise CorruptedError(
            "the private key is not an elliptic-curve key, as all keys of rankdumpd certs are"
        )
    return found


def _encode_certificate(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _encode_private_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


AUTHORITY_NAME = "ca"
REVOKED_FILE = "revoked"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY_MODE, _OPEN_MODE, _FOLDER_MODE = 0o600, 0o644, 0o700
_HEADER = b"# Revoked certificates: SHA-256 fingerprint and name.\n"


class CertificateStore:
    """The files of an authority: `ca.pem`, `NAME.pem`, a `.key` beside each, and `revoked`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def revoked(self) -> Path:
        """Path of the list of revoked certificates."""
        return self.folder / REVOKED_FILE

    def certificate(self, name: str = AUTHORITY_NAME) -> Path:
        """Return the path of the certificate with this name."""
        return self.folder / f"{name}.pem"

    def key(self, name: str = AUTHORITY_NAME) -> Path:
        """Return the path of the private key with this name."""
        return self.folder / f"{name}.key"

    def create_folder(self) -> None:
        """Create the folder for its owner only; ConfigError when it exists and other users may
        enter it.
        """
        try:
            self.folder.mkdir(mode=_FOLDER_MODE, parents=True)
        except FileExistsError:
            if not self.folder.is_dir() or stat.S_IMODE(self.folder.stat().st_mode) & 0o077:
                allowed = "a new folder, or one that only its owner may enter (mode 0700)"
                raise ConfigError(str(self.folder), "", "this folder", allowed) from None
        except OSError as error:
            raise _build_file_error(self.folder, error) from None

    def write_certificate(self, name: str, issued: IssuedCertificate) -> None:
        """Write a certificate and its key; ConfigError when the name is taken."""
        if self.certificate(name).exists() or self.key(name).exists():
            raise ConfigError(str(self.folder), name, "taken", "a name that is free")
        # The key is written first, because a certificate without a key would look complete.
        _create_file(self.key(name), issued.key, _KEY_MODE)
        _create_file(self.certificate(name), issued.certificate, _OPEN_MODE)

    def create_revoked_list(self) -> None:
        """Write an empty list of revoked certificates, unless there is a list."""
        with contextlib.suppress(ConfigError):  # the list exists
            _create_file(self.revoked, _HEADER, _OPEN_MODE)

    def authority(self) -> IssuedCertificate:
        """Return the certificate and key of the authority; ConfigError when the folder has none."""
        self.check_authority()
        return IssuedCertificate(_read_file(self.certificate()), _read_file(self.key()))

    def check_authority(self) -> None:
        """Raise a ConfigError when the folder has no authority."""
        if not self.certificate().exists():
            allowed = f"a folder created by rankdumpd certs init {self.folder}"
            raise ConfigError(str(self.folder), "", "has no authority", allowed)

    def describe_certificate(self, name: str) -> CertificateDescription:
        """Return the description of a certificate; the ConfigError for an unknown name lists the
        known ones.
        """
        if not self.certificate(name).exists():
            there = (
                ", ".join(found for found, _ in self.iter_certificates())
                or "the name of a certificate; none has been issued"
            )
            raise ConfigError(str(self.folder), "", name, there)
        return describe_certificate(_read_file(self.certificate(name)))

    def iter_certificates(self) -> Iterator[tuple[str, CertificateDescription]]:
        """Yield every certificate but the authority's, with the name of its file."""
        for path in sorted(self.folder.glob("*.pem")):
            if path.stem != AUTHORITY_NAME:
                yield path.stem, describe_certificate(_read_file(path))

    def revoke(self, fingerprint: str, name: str) -> None:
        """Append a certificate to the list of revoked ones."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            descriptor = os.open(self.revoked, flags, _OPEN_MODE)
            with os.fdopen(descriptor, "ab") as file:
                file.write(f"{fingerprint} # {name}\n".encode())
        except OSError as error:
            raise _build_file_error(self.revoked, error) from None


def check_certificate_name(name: str) -> str:
    """Return the name if files may have it; else raise a ConfigError."""
    if name in (AUTHORITY_NAME, REVOKED_FILE) or not _NAME.fullmatch(name):
        allowed = (
            'up to 64 letters, digits, ".", "_" and "-", other than '
            f"{AUTHORITY_NAME}, {REVOKED_FILE}"
        )
        raise ConfigError("--name", "", name, allowed)
    return name


def _create_file(path: Path, content: bytes, mode: int) -> None:
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        raise ConfigError(str(path), "", "taken", "a name that is free") from None
    except OSError as error:
        raise _build_file_error(path, error) from None


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _build_file_error(path, error) from None


def _build_file_error(path: Path, error: OSError) -> UnavailableError:
    return UnavailableError(f"{path}: {error.strerror}")
