"""Helpers of the tests of the agent's slabs: agents, ranks with a mapped slab, split records."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

import rankdump
from rankdump._core.manifest import Manifest
from rankdump._core.plan import DeliverySettings

WAIT_S = 300
MIB = 1 << 20
SMALL = DeliverySettings(buffer_bytes=MIB)


def in_slab(session: rankdump.Session) -> bool:
    """Whether what a session dumps goes through shared memory by now."""
    assert session._pipeline is not None
    return session._pipeline._send_buffer.ring is not None


def wait_until(holds) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def arrays_of(root: Path, rank: int = 0) -> list[bytes]:
    """Return the elements of every tensor of a rank, in the order in which they were made."""
    found = (root / f"rank_{rank}" / "Net").rglob("*.npy")
    return [np.load(path).tobytes() for path in sorted(found, key=lambda p: p.name.split(".")[4])]


def manifest_of(root: Path) -> Manifest:
    (path,) = (root / "rank_0" / ".dump_metadata" / "manifest").iterdir()
    return Manifest.from_json(path.read_bytes())


def counts(rank) -> dict:
    (status,) = rank.status().iterations
    return dict(status.dropped) | {
        "stored": status.stored,
        "degraded": status.degraded,
        "expected": status.expected,
    }
