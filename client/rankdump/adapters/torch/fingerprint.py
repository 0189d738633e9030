"""Recognises a tensor that a call began with, without keeping it alive."""

from __future__ import annotations

import weakref
from typing import NamedTuple

from torch import Tensor, strided

from rankdump.adapters.torch.internals import has_own_elements, unwrapped, version_of


class Fingerprint(NamedTuple):
    """Which memory a tensor had, at which version of its content."""

    tensor: weakref.ref[Tensor]
    address: int
    version: int

    def same_as(self, other: Fingerprint) -> bool:
        """Return whether the other one is of the same, unchanged, still living data."""
        mine = self.tensor()
        return (
            mine is not None
            and (self.address, self.version) == (other.address, other.version)
            # Its memory may have been written since, in place.
            and (mine.data_ptr(), version_of(mine)) == (self.address, self.version)
        )


def fingerprint_of(tensor: Tensor | None) -> Fingerprint | None:
    """Return what a tensor is known by; None when it has no address or counts no versions."""
    if tensor is None or unwrapped(tensor) is not tensor or not has_own_elements(tensor):
        return None
    if tensor.is_inference() or tensor.layout is not strided or tensor.is_meta:
        return None
    address = tensor.data_ptr()
    return Fingerprint(weakref.ref(tensor), address, version_of(tensor)) if address else None
