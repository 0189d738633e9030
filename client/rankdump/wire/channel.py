"""How everybody reaches a server: in the clear on this host, with certificates everywhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from rankdump.contract.addresses import is_loopback, is_socket
from rankdump.contract.errors import ConfigError, UnavailableError

Options = Sequence[tuple[str, int | str]]
VARIABLES = ("RANKDUMP_TLS_CA", "RANKDUMP_TLS_CERT", "RANKDUMP_TLS_KEY")
"""Files of the authorities, the own certificate and its key, PEM."""
WHERE = f"{', '.join(VARIABLES)}; of a daemon: the section [tls]"
"""Where certificates are named."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Files by which two sides know each other; none at all where all are empty."""

    ca: str = ""
    certificate: str = ""
    key: str = ""

    @property
    def given(self) -> bool:
        """Whether there are any."""
        return any((self.ca, self.certificate, self.key))


def credentials_in(environ: Mapping[str, str]) -> Credentials:
    """Return those that variables name; that some are missing is said where they are needed."""
    return Credentials(*(environ.get(name, "") for name in VARIABLES))


def connect(
    address: str, credentials: Credentials | None = None, options: Options = ()
) -> grpc.Channel:
    """Return a channel to an address.

    With credentials TCP is encrypted and both sides show who they are. Files are read anew for
    each channel, so certificates that were renewed are used by the next one. ConfigError when
    only some files are named, or none for another host; UnavailableError when one of them cannot
    be read, for it may be there again in a moment.
    """
    if is_socket(address):
        return grpc.insecure_channel(address, options=options)
    if credentials is None or not credentials.given:
        if not is_loopback(address):
            allowed = f"an address of this host as long as there are no certificates ({WHERE})"
            raise ConfigError("address", "", address, allowed)
        return grpc.insecure_channel(address, options=options)
    files = (credentials.ca, credentials.certificate, credentials.key)
    for name, path in zip(VARIABLES, files, strict=True):
        if not path:
            raise ConfigError("environment", name, "", f"a file, as {', '.join(VARIABLES)} are one")
    ca, certificate, key = map(_read, files)
    shown = grpc.ssl_channel_credentials(ca, key, certificate)
    return grpc.secure_channel(address, shown, options=options)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UnavailableError(f"certificate file {path}: {error.strerror}") from None
