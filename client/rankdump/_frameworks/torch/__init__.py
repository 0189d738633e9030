"""Adapter of torch: observes a model through public hooks. torch is imported in this package only;
code that must work without torch must not import this package.
"""

from __future__ import annotations

from rankdump._frameworks.torch.model_hook import attach_model
from rankdump._frameworks.torch.module_hooks import TorchOutermostWatch
from rankdump._frameworks.torch.module_tree import find_class_name
from rankdump._frameworks.torch.parameters import set_dump

__all__ = [
    "TorchOutermostWatch",
    "attach_model",
    "find_class_name",
    "set_dump",
]
