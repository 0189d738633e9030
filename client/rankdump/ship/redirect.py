"""Where an agent of several processes sends a rank on to. Pure."""

from __future__ import annotations

from rankdump.contract.errors import ProtocolError


def redirected(address: str, redirect: str) -> str:
    """Return the address beside the one that was asked; ProtocolError when there is none.

    Beside: in a container the folder of the socket may have another name than on the host.

    >>> redirected("unix:/run/rankdump/agent.sock", "agent.sock.1")
    'unix:/run/rankdump/agent.sock.1'
    >>> redirected("localhost:7420", "41321")
    'localhost:41321'
    """
    if address.startswith("unix:"):
        legal = "/" not in redirect and redirect not in (".", "..")
        folder, slash, _ = address.removeprefix("unix:").rpartition("/")
        found = f"unix:{folder}{slash}{redirect}"
    else:
        legal = redirect.isascii() and redirect.isdecimal() and 0 < int(redirect) <= 0xFFFF
        found = f"{address.rpartition(':')[0]}:{redirect}"
    if not legal:
        raise ProtocolError(f"agent {address} sends on to {redirect!r}, which is not beside it")
    return found
