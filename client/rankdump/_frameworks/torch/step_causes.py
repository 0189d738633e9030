"""Causes of a step of a torch model: digests of the batch and of the state of torch's generator
before the first forward of the model, and the learning rates that an optimizer uses.

They are used by the run card, in iterations that are dumped, and by the black box, in every step.
The generator is read when the model is called first in a step, because a script may seed it after
it attached the model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor
from torch.optim import Optimizer

from rankdump._core.recorder_protocol import CauseRecorder
from rankdump._core.run_card import RANDOM_PREFIX
from rankdump._frameworks.card_digests import (
    MAX_BATCH_TENSORS,
    MAX_DIGEST_BYTES,
    BatchDigests,
)
from rankdump._frameworks.operator_names import CallLeaf
from rankdump._frameworks.torch.tensors import make_torch_source

# torch's stubs leave an optimizer's groups untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false


class StepCauseObserver:
    """Observes the causes of the steps of one attached model."""

    def __init__(self, causes: CauseRecorder) -> None:
        self._causes = causes
        self._batch = BatchDigests()

    @property
    def is_called(self) -> bool:
        """Whether the model was called in this step."""
        return self._batch.is_called

    def begin_step(self, iteration: int) -> None:
        """Begin a step; do nothing if the step of this iteration is already running."""
        self._batch.begin_step(iteration)

    def observe_call(self, leaves: Sequence[CallLeaf], *, on_device: bool) -> None:
        """Report the causes that are known when the model is called; with `on_device`, tensors on
        accelerators are waited for, copied and digested too.
        """
        if not self._batch.is_called:
            self._batch.is_called = True
            state = _hash_memory(torch.default_generator.get_state())
            self._causes.add_digest(f"{RANDOM_PREFIX}cpu", state)
        tensors = [(leaf, leaf.value) for leaf in leaves if isinstance(leaf.value, Tensor)]
        for leaf, value in tensors[:MAX_BATCH_TENSORS]:
            digest = digest_elements(value, on_device=on_device)
            if digest:
                self._causes.add_digest(*self._batch.add(leaf, digest))

    def add_rates(self, optimizer: Optimizer) -> None:
        """Report the learning rates of an optimizer that is about to step."""
        rates = [float(group.get("lr", 0.0)) for group in optimizer.param_groups]
        self._causes.add_rates(optimizer, rates)


def digest_elements(tensor: Tensor, *, on_device: bool) -> str:
    """Return the xxh3-64 of a tensor; empty for a very large one, for one on an accelerator unless
    `on_device` is set, and for one whose elements cannot be read.
    """
    if tensor.nbytes > MAX_DIGEST_BYTES or not (tensor.is_cpu or on_device):
        return ""
    try:
        is_plain = type(tensor) is Tensor and tensor.is_cpu and tensor.is_contiguous()
        if is_plain and not tensor.is_conj() and not tensor.is_neg():
            return _hash_memory(tensor)
    except RuntimeError:
        pass  # the tensor has no memory of its own
    source = make_torch_source(tensor)
    if source is None or isinstance(source, str):
        return ""
    return xxhash.xxh3_64_hexdigest(source.copy_elements())


def _hash_memory(tensor: Tensor) -> str:
    """Return the xxh3-64 of a contiguous tensor in host memory."""
    elements = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return xxhash.xxh3_64_hexdigest(elements)
