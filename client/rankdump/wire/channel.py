"""How everybody reaches a server: in the clear on this host, with certificates everywhere else."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from rankdump.contract.errors import ConfigError

Options = Sequence[tuple[str, int]]
VARIABLES = ("RANKDUMP_TLS_CA", "RANKDUMP_TLS_CERT", "RANKDUMP_TLS_KEY")
"""Files of the authorities, the own certificate and its key, PEM."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Files by which two sides know each other; none at all where all are empty."""

    ca: str = ""
    certificate: str = ""
    key: str = ""

    @property
    def given(self) -> bool:
        """Whether there are any."""
        return bool(self.certificate)


def credentials_in(environ: Mapping[str, str]) -> Credentials:
    """Return those that variables name; ConfigError when only some of them are set."""
    found = [environ.get(name, "") for name in VARIABLES]
    if any(found) and not all(found):
        missing = next(name for name in VARIABLES if not environ.get(name))
        raise ConfigError("environment", missing, "", f"a file, as {', '.join(VARIABLES)} are one")
    return Credentials(*found)


def connect(
    address: str, credentials: Credentials | None = None, options: Options = ()
) -> grpc.Channel:
    """Return a channel to an address; ConfigError when its certificates cannot be read.

    With credentials TCP is encrypted and both sides show who they are. Files are read anew for
    each channel, so certificates that were renewed are used by the next one.
    """
    if credentials is None or not credentials.given or is_socket(address):
        return grpc.insecure_channel(address, options=options)
    ca, certificate, key = (
        _read(path) for path in (credentials.ca, credentials.certificate, credentials.key)
    )
    shown = grpc.ssl_channel_credentials(ca, key, certificate)
    return grpc.secure_channel(address, shown, options=options)


def is_socket(address: str) -> bool:
    """Return whether an address is that of a Unix socket."""
    return address.startswith("unix:")


def is_loopback(address: str) -> bool:
    """Return whether `host:port` is on this host alone."""
    bare = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        return bare == "localhost" or ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        allowed = "a file that can be read"
        raise ConfigError("certificates", path, error.strerror, allowed) from None
