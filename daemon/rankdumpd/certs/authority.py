"""Certificates made and read; touches no file. P-256 keys, SHA-256 signatures."""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rankdump.contract.errors import ConfigError, DamagedError
from rankdumpd.callers import ROLE_URI, roles_in
from rankdumpd.tls import fingerprint_of

AUTHORITY_DAYS = 3650
LEAF_DAYS = 365
# Clocks of hosts differ: what is issued now holds everywhere now.
_BEFORE = datetime.timedelta(minutes=5)
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_DNS_NAME = re.compile(rf"(\*\.)?{_LABEL}(\.{_LABEL})*")


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its private key, PEM."""

    certificate: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class Described:
    """What people want to know of a certificate."""

    name: str
    roles: tuple[str, ...]
    hosts: tuple[str, ...]
    expires: datetime.datetime
    fingerprint: str


def new_authority(name: str, *, now: datetime.datetime) -> Issued:
    """Return an authority for ten years that signs certificates, and no other authorities."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _begun(name, _named(name), key.public_key(), now, AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs=True), critical=True)
    return Issued(_pem(builder.sign(key, hashes.SHA256())), _key_pem(key))


def issue(
    authority: Issued,
    *,
    name: str,
    roles: Sequence[str],
    hosts: Sequence[str],
    days: int,
    now: datetime.datetime,
) -> Issued:
    """Return a certificate for a caller of these roles and, with hosts, a server on them."""
    parent, parent_key = _read(authority.certificate), _read_key(authority.key)
    key = ec.generate_private_key(ec.SECP256R1())
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if hosts:
        # Without hosts nobody can pose as a server with it.
        uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
    names = [x509.UniformResourceIdentifier(ROLE_URI + role) for role in roles]
    builder = _begun(name, parent.subject, key.public_key(), now, days)
    for extension, critical in (
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage(signs=False), True),
        (x509.ExtendedKeyUsage(uses), False),
        (x509.SubjectAlternativeName([*names, *map(_host, hosts)]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(parent_key.public_key()), False),
    ):
        builder = builder.add_extension(extension, critical)
    return Issued(_pem(builder.sign(parent_key, hashes.SHA256())), _key_pem(key))


def described(certificate: bytes) -> Described:
    """Return what a certificate says; DamagedError when it is none."""
    found = _read(certificate)
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    addresses = map(str, names.get_values_for_type(x509.IPAddress))
    common = found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return Described(
        str(common[0].value) if common else "",
        tuple(sorted(roles_in(names.get_values_for_type(x509.UniformResourceIdentifier)))),
        (*names.get_values_for_type(x509.DNSName), *addresses),
        found.not_valid_after_utc,
        fingerprint_of(certificate),
    )


def _begun(
    name: str,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: datetime.datetime,
    days: int,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_named(name))
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(*, signs: bool) -> x509.KeyUsage:
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


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if len(host) > 253 or not _DNS_NAME.fullmatch(host):
            raise ConfigError("--host", "", host, "a host's name or IP address") from None
        return x509.DNSName(host)


def _read(certificate: bytes) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(certificate)
    except ValueError as error:
        raise DamagedError(f"this is no certificate: {error}") from None


def _read_key(key: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        found = serialization.load_pem_private_key(key, None)
    except (ValueError, TypeError) as error:
        raise DamagedError(f"this is no private key: {error}") from None
    if not isinstance(found, ec.EllipticCurvePrivateKey):
        raise DamagedError("this is no key on an elliptic curve, as every one made here is")
    return found


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
