"""Observes a MindSpore model; MindSpore is imported here and nowhere else."""

from rankdump.adapters.mindspore.apis import ApiHook
from rankdump.adapters.mindspore.cells import CellHook
from rankdump.adapters.mindspore.marks import set_dump
from rankdump.adapters.mindspore.outermost import Outermost

__all__ = ["ApiHook", "CellHook", "Outermost", "set_dump"]
