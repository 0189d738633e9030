"""TLS of an HTTP server: its certificate, the identity of callers, and whether the role of a caller
allows a request, based on files that may change while the server runs; and the interface that notes
refused requests.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rankdump._core.caller_roles import (
    LOCAL_CALLER,
    CallerIdentity,
    build_unknown_caller,
    explain_refusal,
    parse_roles,
)
from rankdump._core.certificate_files import (
    RevokedCertificates,
    WatchedFiles,
    compute_fingerprint,
    read_file,
)
from rankdump.errors import ConfigError


class RefusalSink(Protocol):
    """Notes refused requests; called from several threads."""

    def count(self, reason: str) -> None:
        """Note a refusal of which only the reason is known; never waits."""
        ...

    def add(self, reason: str, caller: CallerIdentity, request: str, why: str) -> None:
        """Note a refused request with its first line; may wait for a disk."""
        ...


class HttpsGuard:
    """Admits callers that present a certificate of a trusted authority with a role."""

    def __init__(self, *, ca: str, certificate: str, key: str, revoked: str = "") -> None:
        """ConfigError if a file cannot be read; `revoked` is empty if there is no list of revoked
        certificates.
        """
        self._context = WatchedFiles(tuple(map(Path, (ca, certificate, key))), _build_context)
        self._revoked = RevokedCertificates(Path(revoked)) if revoked else None

    def get_context(self) -> ssl.SSLContext:
        """Return the TLS context for a new connection, from the files as they are now."""
        return self._context.get()

    def explain_refusal(self, method: str, caller: CallerIdentity) -> str:
        """Return why a caller may not call a gRPC method; empty if it may."""
        return explain_refusal(method, caller, revoked=self._read_revoked())

    def is_revoked(self, caller: CallerIdentity) -> bool:
        """Return whether the certificate of a caller has been revoked."""
        return caller.fingerprint in self._read_revoked()

    def _read_revoked(self) -> frozenset[str]:
        return self._revoked.read_fingerprints() if self._revoked else frozenset()


def _build_context(paths: Sequence[Path]) -> ssl.SSLContext:
    ca, certificate, key = paths
    for path in paths:
        read_file(path)  # its error names the file, those of OpenSSL do not
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    # Sessions are not resumed, so that each connection presents its certificate anew.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError:
        raise ConfigError(str(ca), "", "its content", "certificates, PEM") from None
    try:
        # If there were no function for the passphrase, OpenSSL would ask the terminal.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except (ssl.SSLError, OSError) as error:
        cause = getattr(error, "reason", None) or str(error)
        allowed = f"the key of {certificate}, PEM, without a passphrase ({cause})"
        raise ConfigError(str(key), "", "its content", allowed) from None
    return context


def identify_caller(encrypted: ssl.SSLObject | None, peer: str) -> CallerIdentity:
    """Return the caller of a connection, given by the certificate that the handshake verified.

    Without TLS the caller is local.
    """
    if encrypted is None:
        return LOCAL_CALLER
    der = encrypted.getpeercert(binary_form=True)
    shown = encrypted.getpeercert()
    if not der or not shown:
        return build_unknown_caller(peer)
    # The values are untyped, because the type stubs do not say which field has which form.
    fields: Any = shown
    uris = [value for kind, value in fields.get("subjectAltName", ()) if kind == "URI"]
    names = [v for part in fields.get("subject", ()) for k, v in part if k == "commonName"]
    fingerprint = compute_fingerprint(ssl.DER_cert_to_PEM_cert(der).encode())
    return CallerIdentity("".join(names[:1]), parse_roles(uris), fingerprint, peer)


def format_peer(address: Any) -> str:
    """Return an address in the form in which gRPC names a peer; empty for a Unix socket."""
    if not address or isinstance(address, str):
        return ""
    host, port = address[:2]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
