"""Daemons beside the training job: an agent on each host, a coordinator for each job."""

from __future__ import annotations

import os

# Read when gRPC is loaded; without it failed handshakes are not logged.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
