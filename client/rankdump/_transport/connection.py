"""State of the connection to an agent, its timeouts and channel options, and the address after a
redirect. Pure: no clock, no disk, no network.
"""

from __future__ import annotations

from enum import Enum

from rankdump.errors import ProtocolError


def resolve_redirect(address: str, redirect: str) -> str:
    """Return the address after a redirect; ProtocolError when it is not beside the first one.

    A redirect is relative, because a container may have another path to the folder of the socket.

    >>> resolve_redirect("unix:/run/rankdump/agent.sock", "agent.sock.1")
    'unix:/run/rankdump/agent.sock.1'
    >>> resolve_redirect("localhost:7420", "41321")
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
        raise ProtocolError(
            f"agent {address} redirects to {redirect!r}, which is not beside its own address"
        )
    return found


OPEN_TIMEOUT_S = 10.0
LEAVE_TIMEOUT_S = 2.0
MIN_PAUSE_S = 0.05
MAX_PAUSE_S = 5.0
"""Pauses between attempts to connect, which double."""
EXIT_PAUSE_S = 0.5
"""The longest such pause once the session is closing."""
# An agent that restarts is back by then; a job should not hang at its end for one that is gone.
RETURN_AT_EXIT_TIMEOUT_S = 10.0
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 8 << 20),
    ("grpc.enable_http_proxy", 0),
    # A stream that gRPC itself repeats on another connection can end up without any answer; what
    # is resent is decided here.
    ("grpc.enable_retries", 0),
)


class LinkState(Enum):
    """State of the connection."""

    CONNECTING = "connecting"
    """The first attempt is not over."""
    STARTING = "starting"
    """The agent that the job brought along does not serve yet."""
    ABSENT = "absent"
    """No agent has answered so far."""
    UNRESPONSIVE = "unresponsive"
    """No agent has answered in time so far: one may be there, on a busy host."""
    OPENING = "opening"
    """The agent has answered and not opened the session yet: a disk is busy."""
    UP = "up"
    AWAY = "away"
    """The connection was lost."""
    REJECTED = "rejected"
    """The agent rejected the session for good."""
