"""Observer of one attached model, and the guards around every hook: tensors and events go to the
recorder, internal errors are reported and never reach the training, the compiler and a user's
modes never reach our hooks.

Errors of the job are recognised by a fingerprint and never kept: objects in an error's traceback
must be freed when the script releases the error. A script that frees memory and tries again
depends on that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CodeType
from typing import Any, TypeVar

from torch import Tensor

from rankdump._core.record import TensorSide
from rankdump._frameworks.model_observer import ModelObserver
from rankdump._frameworks.operator_names import CallLeaf
from rankdump._frameworks.torch.internals import disable_function_modes, skip_compilation
from rankdump._frameworks.torch.tensors import make_torch_source


class TorchObserver(ModelObserver):
    """Observer of one attached torch model."""

    def record_tensors(
        self, op_type: str, op_name: str, side: TensorSide, leaves: Iterable[CallLeaf]
    ) -> None:
        """Record the tensors among the leaves of one side of an operator."""
        if not self.recorder.is_wanted(self.graph, op_name, side):
            return
        for leaf in leaves:
            if isinstance(leaf.value, Tensor):
                self.record_tensor(
                    op_type, op_name, side, leaf.slot, leaf.argument, make_torch_source, leaf.value
                )

    def record_state(
        self, name: str, argument: str, tensor: Tensor, *, constant: bool = False
    ) -> None:
        """Record a parameter or buffer with its current value."""
        self.record_parameter(
            name, argument, make_torch_source, tensor, state=True, constant=constant
        )

    def record_gradient(self, name: str, tensor: Tensor) -> None:
        """Record the gradient of a parameter as the output of its own operator."""
        self.record_parameter(name, "grad", make_torch_source, tensor)


_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])


def exclude_from_compilation(function: _FunctionT) -> _FunctionT:
    """Exclude a hook that runs between two compiled regions from compilation.

    Otherwise it would be compiled by itself, and a compiled hook observes nothing.
    """
    skip_compilation(function)
    return function


def run_shielded(
    body: Callable[..., None], failed: Callable[[Exception], None], *args: Any
) -> None:
    """Run a hook's body; an error goes to `failed`, an interrupt passes through."""
    try:
        with disable_function_modes():
            body(*args)
    except Exception as error:
        failed(error)


_MAX_CAUSES = 32
"""Limit to the chain of causes that is searched."""


@dataclass(frozen=True, slots=True)
class ErrorFingerprint:
    """Fingerprint by which an error is recognised.

    Identity alone fails if an error was freed and another one took its place in memory; that one
    was hardly raised by the same line.
    """

    identity: int
    code: CodeType | None
    line: int


def find_handled_error() -> int:
    """Return the identity of the error that this thread is handling; 0 without one."""
    error = sys.exc_info()[1]
    return 0 if error is None else id(error)


def find_raised_error(handled: int) -> BaseException | None:
    """Return the error being handled, unless its identity is `handled`."""
    error = sys.exc_info()[1]
    return None if error is None or id(error) == handled else error


def fingerprint_error(error: BaseException) -> ErrorFingerprint:
    """Return the fingerprint of an error that is being handled."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ErrorFingerprint(id(error), None, 0)
    return ErrorFingerprint(id(error), trace.tb_frame.f_code, trace.tb_lineno)


def is_caused_by(error: BaseException, fault: ErrorFingerprint | None) -> bool:
    """Return whether an error is the fingerprinted one, or was raised because of it."""
    found: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if found is None or fault is None:
            return False
        if fingerprint_error(found) == fault:
            return True
        found = found.__cause__ or found.__context__
    return False
