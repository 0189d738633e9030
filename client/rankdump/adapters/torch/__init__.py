"""Observes a torch model through public hooks; torch is imported here and nowhere else."""

from rankdump.adapters.torch.attaching import TorchHook, attach

__all__ = ["TorchHook", "attach"]
