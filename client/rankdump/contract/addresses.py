"""Addresses of daemons: `unix:PATH` for a socket of this host, else `HOST:PORT`. Pure."""

from __future__ import annotations

import ipaddress

DEFAULT_AGENT = "unix:/run/rankdump/agent.sock"
"""Where the agent of a host answers unless RANKDUMP_AGENT says otherwise."""


def is_socket(address: str) -> bool:
    """Return whether an address is that of a Unix socket."""
    return address.startswith("unix:")


def is_loopback(address: str) -> bool:
    """Return whether `HOST:PORT` is on this host alone.

    >>> is_loopback("[::1]:7420"), is_loopback("node7:29500")
    (True, False)
    """
    bare = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        return bare == "localhost" or ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False
