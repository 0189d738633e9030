"""Causes of a failed connection, from messages of gRPC 1.62 to 1.85.

`tests/integration/test_tls.py` has the same cases with real servers and the installed gRPC.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from support.certificate_authority import CertificateAuthority

from rankdump._wire.channel import TlsCredentials, explain_unavailable
from rankdump.errors import UnavailableError

ADDRESS = "127.0.0.1:7421"
NEVER = "failed to connect to all addresses; last error: "
AT = f"ipv4:{ADDRESS}: "
CLOSED = f"{NEVER}UNAVAILABLE: {AT}Socket closed"
RESET = f"{NEVER}UNKNOWN: {AT}recvmsg:Connection reset by peer"
REFUSED = f"UNKNOWN: {AT}Failed to connect to remote host: Connection refused"
SSL = "SSL_ERROR_SSL: error:1000007d:SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED"
NO_TLS = "SSL_ERROR_SSL: error:100000f7:SSL routines:OPENSSL_internal:WRONG_VERSION_NUMBER"
OLD, NEW = "Ssl handshake failed: ", "Tls handshake failed (TSI_PROTOCOL_FAILURE): "
OTHER_HOST = "its certificate names another host than this address"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> TlsCredentials:
    """A certificate that is valid."""
    return CertificateAuthority(tmp_path_factory.mktemp("causes") / "ca").issue("ann", "operator")


def said(text: str, credentials: TlsCredentials | None) -> str:
    return str(explain_unavailable(UnavailableError(text), ADDRESS, credentials))


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (CLOSED, "it rejects the certificate {certificate}"),
        (RESET, "it rejects the certificate {certificate}"),
        (
            f"{NEVER}UNKNOWN: {AT}{NEW}{SSL}: unable to get local issuer certificate: OK",
            "its certificate is not signed by an authority in {ca}: unable to get local issuer "
            "certificate",
        ),
        (
            f"{NEVER}UNKNOWN: {AT}{OLD}{SSL}",
            "its certificate is not valid now, or not signed by an authority in {ca}",
        ),
        (
            f"{NEVER}UNKNOWN: {AT}{NEW}{SSL}: certificate has expired: OK",
            "its certificate has expired",
        ),
        (
            f"{NEVER}UNKNOWN: {AT}{NEW}{SSL}: certificate is not yet valid: OK",
            "its certificate is not valid yet",
        ),
        (
            f"{NEVER}UNKNOWN: {AT}Custom verification check failed with error: UNAUTHENTICATED: "
            "Hostname Verification Check failed.",
            OTHER_HOST,
        ),
        (f"{NEVER}UNKNOWN: {AT}Peer name 127.0.0.1 is not in peer certificate", OTHER_HOST),
        (
            f"{NEVER}UNKNOWN: {AT}{NEW}{NO_TLS}: Invalid certificate verification context: OK",
            "it does not speak TLS, or is not rankdumpd",
        ),
        (f"{NEVER}UNKNOWN: {AT}{OLD}{NO_TLS}", "it does not speak TLS, or is not rankdumpd"),
        (f"{NEVER}{REFUSED}", "Connection refused"),
        ("Deadline Exceeded", "Deadline Exceeded"),
    ],
)
def test_unavailable_with_a_valid_certificate_blames_the_server(
    own: TlsCredentials, text: str, cause: str
):
    """The fault is the server's certificate, or the server rejects the client's."""
    assert said(text, own) == cause.format(**dataclasses.asdict(own))


@pytest.mark.parametrize("text", [CLOSED, RESET])
@pytest.mark.parametrize("credentials", [None, TlsCredentials()])
def test_unavailable_without_a_certificate_names_that(
    text: str, credentials: TlsCredentials | None
):
    assert said(text, credentials).startswith("it closes unencrypted connections: it may require")
    assert said(f"{NEVER}{REFUSED}", credentials) == "Connection refused"


def test_unavailable_names_a_faulty_own_certificate_first(tmp_path: Path):
    """This holds whatever gRPC says, because a closed connection does not name its cause."""
    authority = CertificateAuthority(tmp_path / "ca")
    expired = authority.issue_expired("old", "operator")
    for text in (CLOSED, RESET, f"{NEVER}{REFUSED}"):
        assert said(text, expired).endswith("is not valid: certificate has expired")
    gone = dataclasses.replace(expired, key=str(tmp_path / "none"))
    assert said(CLOSED, gone).endswith("No such file or directory")


def test_unavailable_socket_has_no_explanation(own: TlsCredentials):
    text = f"{NEVER}UNAVAILABLE: unix:/run/a.sock: Socket closed"
    error = explain_unavailable(UnavailableError(text), "unix:/run/a.sock", own)
    assert str(error) == "Socket closed"


def test_broken_connection_does_not_blame_certificates(own: TlsCredentials):
    """The connection was established before, with certificates that were accepted."""
    assert said("Socket closed", own) == "Socket closed"
