"""Why nobody answers, in one sentence: gRPC tells how it tried, and a server never says why not.

A server that does not believe a certificate only closes the connection. So the own one is shown to
the own authorities here, and what they say of it is what the server will have thought.
"""

from __future__ import annotations

import re
import ssl

from rankdump.contract.addresses import is_socket
from rankdump.contract.errors import UnavailableError
from rankdump.wire.channel import WHERE, Credentials

# The words of gRPC, of releases from 1.62 to 1.85.
_NEVER_MET = "failed to connect"
_CLOSED = ("Socket closed", "Connection reset", "recvmsg", "Broken pipe")
_OTHER_HOST = ("Hostname Verification", "is not in peer certificate")
_HOW = re.compile(r"^[A-Z_]+: (?:(?:ipv[46]|unix):\S+: )?(?:Failed to connect to remote host: )?")
"""What gRPC says before the cause: a status code, and the address once more."""
_VERIFY = re.compile(r"CERTIFICATE_VERIFY_FAILED:? ?([^:]*)")


def explained(
    error: UnavailableError, address: str, credentials: Credentials | None = None
) -> UnavailableError:
    """Return an error of an address with its cause in a few words."""
    text = str(error)
    last = _HOW.sub("", text.rpartition("error: ")[2])
    if is_socket(address) or _NEVER_MET not in text:
        return UnavailableError(last)
    if credentials is None or not credentials.given:
        return UnavailableError(_without(last))
    return UnavailableError(_with(text, last, credentials))


def _without(last: str) -> str:
    if any(word in last for word in _CLOSED):
        return f"it closes connections in the clear: it may want certificates ({WHERE})"
    return last


def _with(text: str, last: str, credentials: Credentials) -> str:
    own = own_fault(credentials)
    if own:
        return own
    verdict = _VERIFY.search(text)
    if verdict:
        said = verdict[1].strip()
        whose = f"its certificate is not one that {credentials.ca} vouches for"
        return f"{whose}: {said}" if said else whose
    if any(words in text for words in _OTHER_HOST):
        return "its certificate is for another host than this address names"
    if "WRONG_VERSION_NUMBER" in text:
        return "it does not speak TLS, or is not rankdumpd"
    if any(word in last for word in _CLOSED):
        return f"it does not believe the certificate {credentials.certificate}"
    return last


def own_fault(credentials: Credentials) -> str:
    """Return why nobody will believe these credentials; empty when their authorities would.

    A handshake in memory, in which the own certificate is the client's.
    """
    asked, asks = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    asked.check_hostname, asked.verify_mode = False, ssl.CERT_NONE
    asks.verify_mode = ssl.CERT_REQUIRED
    try:
        for side in (asked, asks):
            side.load_cert_chain(credentials.certificate, credentials.key, password="")
    except OSError as error:  # an SSLError is one
        return f"certificate {credentials.certificate} with {credentials.key}: {_reason(error)}"
    try:
        asks.load_verify_locations(credentials.ca)
    except OSError as error:
        return f"authorities {credentials.ca}: {_reason(error)}"
    return _shaken(asked, asks, credentials.certificate)


def _shaken(asked: ssl.SSLContext, asks: ssl.SSLContext, certificate: str) -> str:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        asked.wrap_bio(to_client, to_server),
        asks.wrap_bio(to_server, to_client, server_side=True),
    )
    try:
        # Two rounds and what TLS 1.3 says at the end; done sides repeat nothing.
        for _ in range(3):
            for side in sides:
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
    except ssl.SSLCertVerificationError as error:
        return f"the own certificate {certificate} is not valid: {error.verify_message}"
    except ssl.SSLError as error:
        return f"the own certificate {certificate} cannot be used: {_reason(error)}"
    return ""


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "not PEM").lower().replace("_", " ")
    return error.strerror or str(error)
