"""Layouts of a model's parameters whose tensors are plain, by what torch's FSDP1, Megatron and
DeepSpeed attached to them. They are found when the structure of a model is read, not in each
iteration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch.nn import Module, Parameter

from rankdump._frameworks.torch.layouts import LayoutFinder
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
    """Return the layouts of plain parameters that are parts, by identity of the parameter."""
    found: dict[int, LayoutFinder] = {}
    if _is_distributed():
        from rankdump._frameworks.torch.fsdp import iterate_fsdp1_layouts

        found.update((id(tensor), finder) for tensor, finder in iterate_fsdp1_layouts(model))
    return found


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
