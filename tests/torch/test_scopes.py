"""Names of a model's modules and parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from rankdump._frameworks.torch.module_tree import build_module_tree, iterate_parameters
from rankdump._session.framework_adapters import find_model_name


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2))


def wrapped_inside(wrap) -> nn.Module:
    model = Net()
    model.inner = wrap(model.inner)
    return model


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


WRAPPERS = {
    "none": lambda: Net(),
    "data parallel": lambda: nn.DataParallel(Net()),
    "compiled": lambda: compiled(Net()),
    "compiled twice wrapped": lambda: nn.DataParallel(compiled(Net())),
    "compiled inside": lambda: wrapped_inside(compiled),
    "checkpoint inside": lambda: wrapped_inside(checkpoint_wrapper),
    "all inside": lambda: wrapped_inside(lambda m: compiled(checkpoint_wrapper(m))),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", WRAPPERS.values(), ids=WRAPPERS)
def test_scopes_have_no_wrappers(make) -> None:
    """Whatever wraps the model or a part of it, the names are those of the bare model."""
    model = make()
    names = {operator.scope.forward_name(0) for operator in build_module_tree(model).operators}
    assert names == {
        "Default/network-Net/Net-op0",
        "Default/network-Net/inner-Sequential/Sequential-op0",
        "Default/network-Net/inner-Sequential/0-Linear/Linear-op0",
    }
    parameters = dict(iterate_parameters(model))
    assert list(parameters) == ["inner.0.weight", "inner.0.bias"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", WRAPPERS.values(), ids=WRAPPERS)
def test_class_name_is_that_of_the_wrapped_model(make) -> None:
    """`acl.json` names a model by its class, whatever the script wraps it in."""
    assert find_model_name(make()) == "Net"
    assert find_model_name("text") == "str"


def test_shared_modules_and_parameters_have_one_name() -> None:
    """A module or parameter in two places has the name of the first."""
    linear = nn.Linear(2, 2)
    tied = nn.Linear(2, 2)
    tied.weight = linear.weight
    model = nn.Sequential(linear, linear, tied)
    names = [operator.scope.path for operator in build_module_tree(model).operators]
    assert names == [
        "network-Sequential",
        "network-Sequential/0-Linear",
        "network-Sequential/2-Linear",
    ]
    assert [name for name, _ in iterate_parameters(model)] == ["0.weight", "0.bias", "2.bias"]


def test_user_module_with_an_attribute_module_is_no_wrapper() -> None:
    """Only torch's own wrappers are skipped, not a child that is named `module`."""
    model = nn.Module()
    model.module = nn.Linear(1, 1)
    assert [name for name, _ in iterate_parameters(model)] == ["module.weight", "module.bias"]
