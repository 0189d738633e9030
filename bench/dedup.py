"""Bytes on disk of a transformer's inputs and outputs, against the same tensors as plain files.

The limit is measured too: the size if every distinct tensor were stored once.
"""

from __future__ import annotations

import torch

from .encoder import SHAPES, encoder_trainer
from .host import running_host
from .result import Result
from .trees import TreeSize, check_complete, size_of

STEPS = 3
_MB = 1e6


def measure() -> Result:
    """Train a few steps with everything dumped, and read the tree."""
    torch.set_num_threads(1)
    trainer = encoder_trainer(SHAPES["standard"])
    with running_host() as host:
        with host.session("dedup") as session:
            session.attach(trainer.model)
            for number in range(STEPS):
                session.step(number)
                trainer.step()
        host.wait_until_packed()
        check_complete(host.tree("dedup"))
        return _result(size_of(host.tree("dedup")))


def _result(size: TreeSize) -> Result:
    return Result(
        figures={
            "plain_mb": size.plain_bytes / _MB,
            "stored_mb": size.stored_bytes / _MB,
            "tensors": size.tensors,
            "files": size.files,
        },
        ratios={
            "stored_vs_plain": size.stored_bytes / size.plain_bytes,
            # Once each: first without packing, then as they are packed now.
            "distinct_vs_plain": size.distinct_plain_bytes / size.plain_bytes,
            "distinct_stored_vs_plain": size.distinct_stored_bytes / size.plain_bytes,
        },
    )
