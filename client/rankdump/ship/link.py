"""How the connection to the agent stands, and how long things may take."""

from __future__ import annotations

from enum import Enum

OPEN_TIMEOUT_S = 10.0
LEAVE_TIMEOUT_S = 2.0
BACKOFF_S = (0.05, 5.0)
# An agent that restarts is back by then; a job should not hang at its end for one that is gone.
RETURN_AT_EXIT_S = 10.0
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 8 << 20),
    ("grpc.enable_http_proxy", 0),
    # A stream that gRPC itself repeats on another connection can end up without any answer; what
    # is resent is decided here.
    ("grpc.enable_retries", 0),
)


class Link(Enum):
    """How the connection stands."""

    CONNECTING = "connecting"
    """No answer yet, of any kind."""
    ABSENT = "absent"
    """Nobody has answered so far."""
    OPENING = "opening"
    """It is there, and has not opened the session yet: a disk is busy."""
    UP = "up"
    AWAY = "away"
    """It was there before."""
    REFUSED = "refused"
    """It said no for good."""
