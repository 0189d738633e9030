"""Layouts of a model's parameters whose tensors are plain, by what torch's FSDP1, Megatron and
DeepSpeed attached to them. They are found when the structure of a model is read, not in each
iteration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter

from rankdump._frameworks.torch.layouts import CheckedLayout, LayoutFinder
from rankdump._frameworks.torch.model_parallel import (
    is_megatron_imported,
    iterate_attribute_layouts,
    iterate_sharded_state,
)
from rankdump._frameworks.torch.module_tree import iterate_parameters


def iterate_sharded_parameters(model: Module) -> Iterator[tuple[str, Parameter]]:
    """Yield each parameter once with its dotted name, as optimizers have it: sharded by FSDP2."""
    sharded: dict[int, Parameter] = {}
    if _is_distributed():
        from rankdump._frameworks.torch.fsdp import find_sharded_parameters

        sharded = find_sharded_parameters(model)
    for name, parameter in iterate_parameters(model):
        yield name, sharded.get(id(parameter), parameter)


def find_parameter_layouts(
    model: Module, named: Sequence[tuple[str, Parameter]]
) -> dict[int, LayoutFinder]:
    """Return the layouts of plain parameters that are parts, by identity of the parameter.

    Of several descriptions of a parameter the one that knows most counts.
    """
    found: dict[int, LayoutFinder] = {}
    for tensor, find_layout in _iterate_layouts(model, named):
        found[id(tensor)] = CheckedLayout(find_layout)
    return found


def _iterate_layouts(
    model: Module, named: Sequence[tuple[str, Parameter]]
) -> Iterator[tuple[Tensor, LayoutFinder]]:
    if not _is_distributed():
        return
    from rankdump._frameworks.torch.fsdp import iterate_fsdp1_layouts

    yield from iterate_attribute_layouts(named)
    if is_megatron_imported():
        yield from iterate_sharded_state(model)
    yield from iterate_fsdp1_layouts(model)


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
