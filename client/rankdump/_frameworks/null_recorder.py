"""Recorders that keep little: `NullRecorder` keeps nothing, for adapters that only count calls;
`DigestRecorder` keeps the digest of each observed tensor, in order, to compare two runs in one
process.
"""

from __future__ import annotations

from collections.abc import Callable

import xxhash

from rankdump._core.determinism import RunDigests, TensorDigest
from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import (
    Recorder,
    TensorObservation,
    TensorSource,
)


class NullRecorder(Recorder):
    """A recorder that records nothing."""


class DigestRecorder(Recorder):
    """Keeps the digests of one run, of all tensors except those of collectives."""

    def __init__(self, find_source: Callable[[], str]) -> None:
        """`find_source` returns `file:line` of the script's innermost call."""
        self.run = RunDigests()
        self._find_source = find_source

    @property
    def armed(self) -> bool:
        """Always: the step is run to be recorded."""
        return True

    def add_value(self, op_type: str, name: str, slot: int, value: object) -> None:
        """Keep the digest of a value that is no tensor."""
        self.add_digest(op_type, name, slot, xxhash.xxh3_64_hexdigest(repr(value).encode()))

    def add_digest(self, op_type: str, name: str, slot: int, digest: str) -> None:
        """Keep the digest of a value."""
        made = TensorDigest(op_type, name, TensorSide.OUTPUT, slot, "", "", digest)
        self.run.digests.append(made)

    def begin_call(self, graph: int, op_name: str) -> None:
        """Keep the line of the script that made the call."""
        self.run.sources.setdefault(op_name, self._find_source())

    def is_wanted(self, graph: int, op_name: str, side: TensorSide) -> bool:
        """Return True."""
        return True

    def observe(self, observation: TensorObservation) -> None:
        """Keep the digest of a tensor."""
        about, source = observation, observation.tensor
        kind = f"{source.dtype} ({','.join(map(str, source.shape))})"
        made = TensorDigest(
            about.op_type,
            about.op_name,
            about.side,
            about.slot,
            about.argument,
            kind,
            digest_source(source),
        )
        self.run.digests.append(made)

    def count_loss(
        self, graph: int, op_type: str, op_name: str, side: TensorSide, slot: int, reason: str
    ) -> None:
        """Count a tensor that cannot be read."""
        self.run.unread += 1


def digest_source(source: TensorSource) -> str:
    """Return the xxh3-64 of the elements of a tensor, in C order."""
    elements = source.elements()
    return xxhash.xxh3_64_hexdigest(source.copy_elements() if elements is None else elements)
