"""The patch that makes operators of tensors recognisable."""

# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from support.armed_iteration import COMPILING, watched
from torch import Tensor, nn

from rankdump._frameworks.api_calls import ApiOptions
from rankdump._frameworks.torch.api_framework import TorchApiHook
from rankdump._frameworks.torch.apis.function_patches import OperatorPatch

OPERATORS = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"),
    *("and_", "or_", "xor", "lshift", "rshift", "eq", "ne", "lt", "le", "gt", "ge"),
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow"),
    *("iand", "ior", "ixor", "ilshift", "irshift"),
)
NUMBERS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor")


class LoggingTensor(Tensor):
    """Tensor that keeps the functions of its `__torch_function__`."""

    told: list[Any]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None) -> Any:
        cls.told.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def written() -> tuple[list[Any], list[Any]]:
    """Write every operator; return what a subclass was told of, and what came out."""
    LoggingTensor.told = []
    found = []
    for name in OPERATORS:
        floats = "truediv" in name
        x = torch.tensor([6.0 if floats else 6]).as_subclass(LoggingTensor)
        found.append(getattr(operator, name)(x, torch.tensor([2])))
    x = torch.tensor([6]).as_subclass(LoggingTensor)
    found += [getattr(operator, name)(2, x) for name in NUMBERS]
    found += [-x, +x, ~x, abs(x)]
    with torch._C.DisableTorchFunction():
        return LoggingTensor.told, [each.tolist() for each in found]


def test_operator_patch_does_not_change_calls_to_subclasses(recorder) -> None:
    """A subclass may depend on the function that `__torch_function__` receives."""
    before = written()
    with watched(recorder, filter_data=False):
        assert written() == before
    assert "Tensor___radd___0_forward" in recorder.names


def test_operator_patch_is_removed(recorder) -> None:
    """The class is restored when the last of two hooks is removed, in either order."""
    before = dict(vars(Tensor))
    first, second = (TorchApiHook(nn.Sequential(), recorder, n, ApiOptions()) for n in range(2))
    assert vars(Tensor)["__add__"] is not before.get("__add__")
    first.detach()
    first.detach()
    assert vars(Tensor)["__add__"] is not before.get("__add__")
    second.detach()
    assert dict(vars(Tensor)) == before


def test_operator_patch_keeps_patches_by_others(recorder, monkeypatch) -> None:
    """A patch made by others while we observe stays afterwards."""
    hook = TorchApiHook(nn.Sequential(), recorder, 0, ApiOptions())
    method = Tensor.__mul__

    def theirs(self: Tensor, other: Any) -> Tensor:
        return method(self, other)

    monkeypatch.setattr(Tensor, "__mul__", theirs)
    hook.detach()
    assert Tensor.__mul__ is theirs
    assert (torch.ones(1) * 2).tolist() == [2.0]


def test_operator_patch_keeps_errors_of_python(recorder) -> None:
    """An operator that no operand supports raises the same error as without us."""
    with watched(recorder), pytest.raises(TypeError, match=r"unsupported operand type\(s\) for \+"):
        _ = torch.ones(1) + "text"  # pyright: ignore[reportOperatorIssue]


@pytest.mark.usefixtures("fresh_compiler")
class TestCompiled:
    """The compiler knows nothing of it."""

    pytestmark = COMPILING

    @pytest.fixture
    def fresh_compiler(self) -> None:
        torch.compiler.reset()

    def test_operators_in_compiled_code_are_neither_read_nor_compiled_again(self) -> None:
        graphs: list[str] = []

        def backend(graph: Any, inputs: Any) -> Any:
            graphs.append(graph.code)
            return graph.forward

        def called(x: Tensor) -> Tensor:
            return 2 * x + 1 / x - x**2

        x = torch.full((3,), 2.0)
        compiled = torch.compile(called, backend=backend, fullgraph=True)
        expected = compiled(x)
        operators = OperatorPatch()
        try:
            assert torch.equal(compiled(x), expected)
            assert len(graphs) == 1
            torch.compiler.reset()
            assert torch.equal(compiled(x), expected)
        finally:
            operators.remove()
        assert torch.equal(compiled(x), expected)
        assert len(graphs) == 2
        assert graphs[0] == graphs[1]
