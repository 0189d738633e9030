"""Part of the run card about one attached MindSpore model, in iterations that are dumped: digests
of the batch and of parameters before the step, states of generators, seeds and flags, and the
learning rate if it is a single number. They are read when the model is called, or when compiled
code runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import xxhash

from rankdump._core.recorder_protocol import CardRecorder
from rankdump._core.run_card import RANDOM_PREFIX, ParameterDigest
from rankdump._frameworks.card_digests import (
    MAX_BATCH_TENSORS,
    MAX_DIGEST_BYTES,
    BatchDigests,
    LogicalParameter,
    digest_head,
    is_parameter_due,
    summarize_parameters,
)
from rankdump._frameworks.mindspore.framework import read_generator_state, read_settings
from rankdump._frameworks.mindspore.tensors import is_tensor, make_mindspore_source
from rankdump._frameworks.operator_names import CallLeaf


class MindSporeCardObserver:
    """Reports the facts of one attached model to the run card."""

    def __init__(self, card: CardRecorder, model: Any, graph: int) -> None:
        self._card, self._model, self._graph = card, model, graph
        self._batch = BatchDigests()
        self._iteration = -1
        self._has_digested = False
        """Whether parameters have been digested in any step."""

    def begin_step(self, iteration: int) -> None:
        """Begin a step."""
        self._iteration = iteration
        self._batch.begin_step(iteration)

    def observe_call(self, leaves: Sequence[CallLeaf]) -> None:
        """Report the facts that are known when the model is called."""
        if not self._batch.is_called:
            self._batch.is_called = True
            self._card.use_settings(read_settings())
            self._card.add_random_states()
            state = digest_tensor(read_generator_state())
            if state:
                self._card.add_digest(f"{RANDOM_PREFIX}mindspore", state)
            self._add_parameters()
        for leaf in [leaf for leaf in leaves if is_tensor(leaf.value)][:MAX_BATCH_TENSORS]:
            digest = digest_tensor(leaf.value)
            if digest:
                self._card.add_digest(*self._batch.add(leaf, digest))

    def observe_optimizer(self, optimizer: Any) -> None:
        """Report the learning rate of an optimizer that is about to step, if it is a
        single number.
        """
        rate: Any = getattr(optimizer, "learning_rate", None)
        # A schedule of learning rates is a cell, and calling it would count as a step.
        if is_tensor(rate) and not rate.shape:
            self._card.add_rates(optimizer, [float(rate.asnumpy())])

    def _add_parameters(self) -> None:
        is_first = not self._has_digested
        found: dict[str, ParameterDigest] = {}
        parameters: list[LogicalParameter] = []
        for parameter in self._model.get_parameters():
            source = make_mindspore_source(parameter)
            if isinstance(source, str):
                continue
            layout = self._card.find_layout(parameter.name, source.shape)
            name, shape = parameter.name, source.shape
            if layout is not None:
                name, shape = layout.logical_name or name, layout.global_shape
            parameters.append(LogicalParameter(name, shape, source.dtype))
            if is_first or is_parameter_due(name, self._iteration):
                digest = digest_head(source, layout)
                if digest is not None:
                    found[name] = digest
        self._has_digested = self._has_digested or bool(found)
        self._card.add_model(self._graph, summarize_parameters(parameters))
        self._card.add_parameters(self._graph, found)


def digest_tensor(tensor: Any) -> str:
    """Return the xxh3-64 of a tensor; empty for None, and for a tensor that is unreadable or too
    large.
    """
    source = make_mindspore_source(tensor) if is_tensor(tensor) else ""
    if isinstance(source, str) or source.byte_count > MAX_DIGEST_BYTES:
        return ""
    return xxhash.xxh3_64_hexdigest(source.copy_elements())
