"""Observes a torch model through public hooks; torch is imported here and nowhere else."""

from rankdump.adapters.torch.attaching import TorchHook, attach
from rankdump.adapters.torch.marks import set_dump

__all__ = ["TorchHook", "attach", "set_dump"]
