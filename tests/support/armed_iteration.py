"""One armed iteration for tests of hooks on torch's API, and the checks after it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rankdump._frameworks.api_calls import ApiOptions
from rankdump._frameworks.torch.api_framework import TorchApiHook
from rankdump._frameworks.torch.module_tree import COMPILED_WARNING

COMPILING = [
    # torch's own compiler meets deprecations of the interpreter and of itself.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@contextmanager
def watched(
    recorder: Any, model: nn.Module | None = None, **options: Any
) -> Generator[TorchApiHook]:
    """Observe calls of APIs for the length of one armed iteration."""
    hook = TorchApiHook(model or nn.Sequential(), recorder, 0, ApiOptions(**options))
    try:
        hook.iteration_begins(0, armed=True)
        yield hook
        hook.iteration_ends(0, armed=True)
    finally:
        hook.detach()
    assert not modes()
    assert not [warning for warning in recorder.warnings if warning != COMPILED_WARNING]
    recorder.wait_for_ends()


def modes() -> list[TorchFunctionMode]:
    """Return the function modes of this thread, the innermost one last."""
    stack: Any = torch._C
    return [stack._get_function_stack_at(at) for at in range(stack._len_torch_function_stack())]
