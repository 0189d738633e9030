"""Knows the calls that activation checkpointing makes again within the backward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from rankdump.adapters.api_calls import ApiLeaf
from rankdump.adapters.torch.internals import backward_step, saving_watcher
from rankdump.adapters.torch.numbering import Numbering
from rankdump.adapters.torch.pairing import Call, Step
from rankdump.contract.layout.api_name import ApiCall
from rankdump.hook import Scope

_REMEMBERED = 1 << 16
"""Calls of an evaluation could be repeated, too, for all that is known; nobody repeats them."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """A call that repeats one of the forward."""

    original: ApiCall | None
    """Which one, if that is known."""
    has_gradients: bool
    """Those of what it returns arrive here, not at what the original returned."""


class Repeats:
    """The calls of one iteration that may be repeated; safe to use from several threads."""

    def __init__(self) -> None:
        self._numbering = Numbering()
        self._originals: dict[Call, ApiCall] = {}

    def restart(self) -> None:
        """Forget all calls: an iteration begins."""
        self._numbering.restart()
        self._originals.clear()

    def of(self, call: ApiCall, leaves: Iterable[ApiLeaf]) -> Repeat | None:
        """Return what a call that begins repeats; None for any that does not."""
        step, grad = backward_step(), torch.is_grad_enabled()
        watched = saving_watcher() is not None
        if step is None:
            # In a region to be repeated nothing is kept for the backward, or somebody watches.
            if watched or not grad:
                self._note(call, leaves)
            return None
        # A function written in Python that computes its own gradient does so without gradients.
        if not watched and not (step[2] and grad):
            return None
        found = self._numbering.recomputation(_scope(call), _first(leaves), Step(*step))
        original = None if found is None else self._originals.get(found)
        return Repeat(original, has_gradients=not watched)

    def _note(self, call: ApiCall, leaves: Iterable[ApiLeaf]) -> None:
        if len(self._originals) >= _REMEMBERED:
            self.restart()
        self._originals[self._numbering.forward(_scope(call), _first(leaves))] = call


def _scope(call: ApiCall) -> Scope:
    return Scope(call.op_type, call.op_type)


def _first(leaves: Iterable[ApiLeaf]) -> Tensor | None:
    return next((leaf.value for leaf in leaves if isinstance(leaf.value, Tensor)), None)
