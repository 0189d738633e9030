"""Daemons beside the training job: an agent on each host, a coordinator for each job."""

from __future__ import annotations

import os

# Read when gRPC is loaded. Nobody else says which handshake failed.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
