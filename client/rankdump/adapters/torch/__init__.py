"""Observes a torch model through public hooks; torch is imported here and nowhere else."""

from rankdump.adapters.torch.attaching import TorchHook, attach
from rankdump.adapters.torch.marks import set_dump
from rankdump.adapters.torch.outermost import Outermost
from rankdump.adapters.torch.scopes import class_name
from rankdump.adapters.torch.tensors import source_of

__all__ = ["Outermost", "TorchHook", "attach", "class_name", "set_dump", "source_of"]
