"""Channels to daemons, unencrypted on this host and with certificates everywhere else; errors as
gRPC status codes in both directions; and the reason why no daemon answers, in one sentence.

A server that does not trust a certificate just closes the connection. So the client verifies its
own certificate against its own authorities, and takes their verdict for the server's.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from rankdump._core.daemon_endpoint import is_loopback, is_socket_address
from rankdump.errors import (
    ConfigError,
    CorruptedError,
    ExhaustedError,
    ForbiddenError,
    PermanentError,
    ProtocolError,
    RankdumpError,
    RejectedError,
    RetryableError,
    UnavailableError,
    UnsupportedError,
)

ChannelOptions = Sequence[tuple[str, int | str]]
TLS_VARIABLES = ("RANKDUMP_TLS_CA", "RANKDUMP_TLS_CERT", "RANKDUMP_TLS_KEY")
"""Variables with the paths of the PEM files of the authorities, the own certificate and its key."""
TLS_SETTINGS_PLACE = f"{', '.join(TLS_VARIABLES)}; of a daemon: the section [tls]"
"""Text that says where certificates are configured."""


@dataclass(frozen=True, slots=True)
class TlsCredentials:
    """Files with which two sides authenticate each other; all paths may be empty."""

    ca: str = ""
    certificate: str = ""
    key: str = ""

    @property
    def has_files(self) -> bool:
        """Whether any file is named."""
        return any((self.ca, self.certificate, self.key))


def read_credentials(environ: Mapping[str, str]) -> TlsCredentials:
    """Return the files that the variables name. If only some of them are set, the error is raised
    where all are needed.
    """
    return TlsCredentials(*(environ.get(name, "") for name in TLS_VARIABLES))


def require_files(credentials: TlsCredentials) -> tuple[str, str, str]:
    """Return the paths of authorities, certificate and key; ConfigError if only some are named."""
    files = (credentials.ca, credentials.certificate, credentials.key)
    for name, path in zip(TLS_VARIABLES, files, strict=True):
        if not path:
            raise ConfigError(
                "environment", name, "", f"a file: {', '.join(TLS_VARIABLES)} are set together"
            )
    return files


def open_channel(
    address: str, credentials: TlsCredentials | None = None, options: ChannelOptions = ()
) -> grpc.Channel:
    """Return a channel to an address.

    With credentials, TCP is encrypted and both sides present certificates. The files are read anew
    for each channel, so the next channel uses certificates that were renewed. ConfigError if only
    some files are named, or none for another host; UnavailableError if a file cannot be read,
    because it may be there again in a moment.
    """
    if is_socket_address(address):
        return grpc.insecure_channel(address, options=options)
    if credentials is None or not credentials.has_files:
        if not is_loopback(address):
            allowed = (
                "an address of this host as long as there are no certificates "
                f"({TLS_SETTINGS_PLACE})"
            )
            raise ConfigError("address", "", address, allowed)
        return grpc.insecure_channel(address, options=options)
    files = require_files(credentials)
    ca, certificate, key = map(_read_certificate, files)
    shown = grpc.ssl_channel_credentials(ca, key, certificate)
    return grpc.secure_channel(address, shown, options=options)


def _read_certificate(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UnavailableError(f"certificate file {path}: {error.strerror}") from None


# Texts of gRPC's errors in its releases from 1.62 to 1.85.
_CONNECT_FAILURE = "failed to connect"
_CLOSED_WORDS = ("Socket closed", "Connection reset", "recvmsg", "Broken pipe")
_HOST_MISMATCH_WORDS = ("Hostname Verification", "is not in peer certificate")
_STATUS_PREFIX = re.compile(
    r"^[A-Z_]+: (?:(?:ipv[46]|unix):\S+: )?(?:Failed to connect to remote host: )?"
)
"""Text of gRPC's errors before the cause: a status code, and the address again."""
_TIME_FAULTS = {
    "has expired": "its certificate has expired",
    "not yet valid": "its certificate is not valid yet",
}
_VERIFY_FAILURE = re.compile(r"CERTIFICATE_VERIFY_FAILED:? ?([^:]*)")


def explain_failure(
    failure: grpc.RpcError | RankdumpError, address: str, credentials: TlsCredentials | None = None
) -> RankdumpError:
    """Return the error that a failed call to an address means, with the cause if no server answers
    there.
    """
    error = make_error(failure) if isinstance(failure, grpc.RpcError) else failure
    if isinstance(error, UnavailableError):
        return explain_unavailable(error, address, credentials)
    return error


def explain_unavailable(
    error: UnavailableError, address: str, credentials: TlsCredentials | None = None
) -> UnavailableError:
    """Return an error about an address, with its cause in a few words."""
    text = str(error)
    last = _STATUS_PREFIX.sub("", text.rpartition("error: ")[2])
    if is_socket_address(address) or _CONNECT_FAILURE not in text:
        return UnavailableError(last)
    if credentials is None or not credentials.has_files:
        return UnavailableError(_explain_without_credentials(last))
    return UnavailableError(_explain_with_credentials(text, last, credentials))


def is_call_lost(failure: grpc.RpcError) -> bool:
    """Return whether a call was running when its server ended; False for a call that no server
    answered.
    """
    if not isinstance(failure, grpc.Call):
        return False
    lost = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    return failure.code() in lost and _CONNECT_FAILURE not in (failure.details() or "")


def _explain_without_credentials(last: str) -> str:
    if any(word in last for word in _CLOSED_WORDS):
        return (
            f"it closes unencrypted connections: it may require certificates ({TLS_SETTINGS_PLACE})"
        )
    return last


def _explain_with_credentials(text: str, last: str, credentials: TlsCredentials) -> str:
    own = find_credentials_fault(credentials)
    if own:
        return own
    verdict = _VERIFY_FAILURE.search(text)
    if verdict:
        return _explain_verdict(verdict[1].strip(), credentials.ca)
    if any(words in text for words in _HOST_MISMATCH_WORDS):
        return "its certificate names another host than this address"
    if "WRONG_VERSION_NUMBER" in text:
        return "it does not speak TLS, or is not rankdumpd"
    if any(word in last for word in _CLOSED_WORDS):
        return f"it rejects the certificate {credentials.certificate}"
    return last


def _explain_verdict(said: str, ca: str) -> str:
    """Return what is wrong with the certificate of a server, given the reason of OpenSSL."""
    for reason, fault in _TIME_FAULTS.items():
        if reason in said:
            return fault
    if said:
        return f"its certificate is not signed by an authority in {ca}: {said}"
    return f"its certificate is not valid now, or not signed by an authority in {ca}"


def find_credentials_fault(credentials: TlsCredentials) -> str:
    """Return why a server would reject these credentials; empty if their own authorities accept
    them.

    The check is a handshake in memory in which both sides present this certificate, and the
    authorities of the server are taken to be the own ones.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    server.verify_mode = ssl.CERT_REQUIRED
    try:
        for side in (client, server):
            side.load_cert_chain(credentials.certificate, credentials.key, password="")
    except OSError as error:  # an SSLError is an OSError
        return (
            f"certificate {credentials.certificate} with {credentials.key}: {_format_reason(error)}"
        )
    try:
        server.load_verify_locations(credentials.ca)
    except OSError as error:
        return f"authorities {credentials.ca}: {_format_reason(error)}"
    return _try_handshake(client, server, credentials.certificate)


def _try_handshake(client: ssl.SSLContext, server: ssl.SSLContext, certificate: str) -> str:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    try:
        # Two rounds, and one more for what TLS 1.3 sends at the end; a side that has finished
        # repeats nothing.
        for _ in range(3):
            for side in sides:
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
    except ssl.SSLCertVerificationError as error:
        return f"the certificate {certificate} is not valid: {error.verify_message}"
    except ssl.SSLError as error:
        return f"the certificate {certificate} cannot be used: {_format_reason(error)}"
    return ""


def _format_reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "not PEM").lower().replace("_", " ")
    return error.strerror or str(error)


CODES_BY_ERROR: tuple[tuple[type[RankdumpError], grpc.StatusCode], ...] = (
    (ConfigError, grpc.StatusCode.INVALID_ARGUMENT),
    (ProtocolError, grpc.StatusCode.INVALID_ARGUMENT),
    (UnsupportedError, grpc.StatusCode.UNIMPLEMENTED),
    (ForbiddenError, grpc.StatusCode.PERMISSION_DENIED),
    (RejectedError, grpc.StatusCode.FAILED_PRECONDITION),
    (CorruptedError, grpc.StatusCode.DATA_LOSS),
    (ExhaustedError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (RetryableError, grpc.StatusCode.UNAVAILABLE),
    (PermanentError, grpc.StatusCode.FAILED_PRECONDITION),
)
"""Status code that a server answers for each error; the first matching row counts."""

ERRORS_BY_CODE: dict[grpc.StatusCode, type[RankdumpError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: ProtocolError,
    grpc.StatusCode.UNIMPLEMENTED: UnsupportedError,
    grpc.StatusCode.FAILED_PRECONDITION: RejectedError,
    grpc.StatusCode.PERMISSION_DENIED: ForbiddenError,
    grpc.StatusCode.UNAUTHENTICATED: ForbiddenError,
    grpc.StatusCode.DATA_LOSS: CorruptedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ExhaustedError,
}
"""Error that a client raises for each status code; any other code may be temporary and becomes
UnavailableError.
"""


def get_status_code(error: RankdumpError) -> grpc.StatusCode:
    """Return the status code with which a server reports an error."""
    for kind, code in CODES_BY_ERROR:
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.INTERNAL


ANSWERED_KEY = "rankdump-answered"
"""Trailing metadata of each error that is the answer of a server; earlier servers have none."""


def is_answer(failure: BaseException) -> bool:
    """Return whether a failed call was answered, and is not the failure of a connection."""
    if not isinstance(failure, grpc.Call):
        return False
    return any(key == ANSWERED_KEY for key, _ in failure.trailing_metadata() or ())


def make_error(failure: grpc.RpcError) -> RankdumpError:
    """Return the error that a failed call means for its caller."""
    if not isinstance(failure, grpc.Call):
        return UnavailableError(str(failure))
    kind = ERRORS_BY_CODE.get(failure.code(), UnavailableError)
    return kind(failure.details() or failure.code().name)
