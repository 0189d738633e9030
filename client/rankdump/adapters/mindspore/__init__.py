"""Observes a MindSpore model in PyNative mode; MindSpore is imported here and nowhere else."""

from rankdump.adapters.mindspore.apis import ApiHook

__all__ = ["ApiHook"]
