"""The frozen values that the rooms of a training process hand to each other."""

from rankdump.values.recording import Begun, Collective, IterationHook, Recorder
from rankdump.values.tensors import (
    Accelerator,
    Decision,
    Deferred,
    Observation,
    Placing,
    Staged,
    Standing,
    TensorSource,
    Transfer,
)

__all__ = [
    "Accelerator",
    "Begun",
    "Collective",
    "Decision",
    "Deferred",
    "IterationHook",
    "Observation",
    "Placing",
    "Recorder",
    "Staged",
    "Standing",
    "TensorSource",
    "Transfer",
]
