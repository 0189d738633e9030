"""Observes a torch model through public hooks; torch is imported here and nowhere else."""

from rankdump.adapters.torch.attaching import TorchHook, attach
from rankdump.adapters.torch.marks import set_dump
from rankdump.adapters.torch.outermost import Outermost

__all__ = ["Outermost", "TorchHook", "attach", "set_dump"]
