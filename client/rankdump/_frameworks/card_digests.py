"""Digests for run cards: of the tensors that a model is called with, over all its calls in a step;
and of parameters, with the decisions which of them are due in an iteration and which elements
count. Also the summary of a model. Digests of parameters are equal in every layout of a job,
because they depend on logical names and shapes only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import prod
from typing import NamedTuple

import numpy as np
import xxhash

from rankdump._core.recorder_protocol import TensorSource
from rankdump._core.run_card import BATCH_PREFIX, ModelSummary, ParameterDigest
from rankdump._core.tensor_fingerprint import compute_digest, place_head
from rankdump._core.tensor_layout import TensorLayout
from rankdump._frameworks.operator_names import CallLeaf
from rankdump._kernels.element_moments import find_address

MAX_BATCH_TENSORS = 16
MAX_DIGEST_BYTES = 1 << 24
"""Maximum size of a tensor that is digested."""
_KEYWORD_PREFIX = "kwargs."


def name_batch_tensor(leaf: CallLeaf) -> str:
    """Return the name of a model's argument in a run card: `batch.0`, or `batch.input_ids` for a
    keyword.
    """
    keyword = leaf.argument.removeprefix(_KEYWORD_PREFIX)
    return f"{BATCH_PREFIX}{leaf.slot if keyword == leaf.argument else keyword}"


class BatchDigests:
    """Digests of the arguments of one model in one step, by the names of a run card."""

    def __init__(self) -> None:
        self._iteration: int | None = None
        self._digests: dict[str, str] = {}
        self.is_called = False
        """Whether the model was called in this step."""

    def begin_step(self, iteration: int) -> None:
        """Begin a step; do nothing if the step of this iteration is already running."""
        if iteration != self._iteration:
            self._iteration, self.is_called = iteration, False
            self._digests = {}

    def add(self, leaf: CallLeaf, digest: str) -> tuple[str, str]:
        """Add a tensor of a call; return its name, and its digest over all calls so far."""
        name = name_batch_tensor(leaf)
        before = self._digests.get(name)
        if before is not None:  # an earlier call, such as for another micro-batch
            digest = xxhash.xxh3_64_hexdigest(f"{before}{digest}".encode())
        self._digests[name] = digest
        return name, digest


HEAD_ELEMENTS = 1 << 16
"""Maximum number of elements that are digested of a parameter; they take 0.12 ms."""
TURN_ITERATIONS = 16
"""Number of iterations in which each parameter is digested once."""


class LogicalParameter(NamedTuple):
    """A parameter with its logical name and shape, as in the whole model."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def is_parameter_due(name: str, iteration: int) -> bool:
    """Return whether the parameter with this logical name is digested in an iteration.

    >>> sum(is_parameter_due("layers.0.weight", iteration) for iteration in range(32))
    2
    """
    turn = xxhash.xxh3_64_intdigest(name.encode(errors="replace")) % TURN_ITERATIONS
    return (iteration + turn) % TURN_ITERATIONS == 0


def digest_head(source: TensorSource, layout: TensorLayout | None) -> ParameterDigest | None:
    """Return the digest of this rank's part of the head of a parameter; None if the rank has no
    part of the head, has operands of a reduction instead of elements, or has a part without a
    single place.
    """
    if layout is not None and layout.is_partial:
        return None
    placed = place_head(source.dtype, source.shape, layout, HEAD_ELEMENTS)
    if placed is None or not placed.elements:
        return None
    data = source.make_head_source(placed.elements).copy_elements()
    digest = compute_digest(find_address(np.frombuffer(data, np.uint8)), placed.fingerprint)
    return ParameterDigest(source.dtype, digest, placed.part)


def summarize_parameters(parameters: Iterable[LogicalParameter]) -> ModelSummary:
    """Return the summary of a model's parameters, without the model's name."""
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: Counter[str] = Counter()
    for name, shape, dtype in parameters:
        shapes[name] = shape
        dtypes[dtype] += 1
    text = "\n".join(f"{name} {shapes[name]}" for name in sorted(shapes))
    digest = xxhash.xxh3_64_hexdigest(text.encode(errors="replace"))
    elements = sum(map(prod, shapes.values()))
    return ModelSummary("", len(shapes), elements, digest, dict(sorted(dtypes.items())))
