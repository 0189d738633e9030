"""Digests of the tensors that a model is called with, over all its calls in a step. Pure."""

from __future__ import annotations

import xxhash

from rankdump._core.run_card import BATCH_PREFIX
from rankdump._frameworks.operator_names import CallLeaf

MAX_BATCH_TENSORS = 16
MAX_DIGEST_BYTES = 1 << 24
"""A larger tensor has no digest."""
_KEYWORD_PREFIX = "kwargs."


def name_batch_tensor(leaf: CallLeaf) -> str:
    """Return the name of an argument of a model: `batch.0`, or `batch.input_ids` for a keyword."""
    keyword = leaf.argument.removeprefix(_KEYWORD_PREFIX)
    return f"{BATCH_PREFIX}{leaf.slot if keyword == leaf.argument else keyword}"


class BatchDigests:
    """Digests of one model and step, by the names of a run card."""

    def __init__(self) -> None:
        self._iteration: int | None = None
        self._digests: dict[str, str] = {}
        self.is_called = False
        """Whether the model was called in this step."""

    def begin_step(self, iteration: int) -> None:
        """Begin a step; an iteration that is begun again goes on."""
        if iteration != self._iteration:
            self._iteration, self.is_called = iteration, False
            self._digests = {}

    def add(self, leaf: CallLeaf, digest: str) -> tuple[str, str]:
        """Add a tensor of a call; return its name, and the digest of it in all calls so far."""
        name = name_batch_tensor(leaf)
        before = self._digests.get(name)
        if before is not None:  # the model was called before, with another micro-batch
            digest = xxhash.xxh3_64_hexdigest(f"{before}{digest}".encode())
        self._digests[name] = digest
        return name, digest
