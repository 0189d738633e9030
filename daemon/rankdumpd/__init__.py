"""Daemons beside the training job: an agent on each host, a coordinator for each job."""

from __future__ import annotations

import os

# gRPC reads this variable when it is loaded; at this level it does not log failed handshakes.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
