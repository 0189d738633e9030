"""Arguments of modules, as texts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rankdump._frameworks.torch.module_tree import read_module_arguments


class Odd(nn.Module):
    """Has attributes of every kind, few of them plain."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = torch.bfloat16
        self.place = torch.device("cpu", 1)
        self.nested = ((1, 2), (3, None))
        self.deeper = (((1,),),)
        self.text = "mean"
        self.long_text = "x" * 5000
        self.number = 1e-05
        self.off = False
        self.nothing = None
        self.listed = [1, 2]
        self.tensor = torch.ones(2)
        self.function = torch.relu
        self.part = nn.ReLU()
        self._hidden = 3


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (
            nn.Conv2d(3, 8, 3, stride=2, padding="valid", bias=False),
            {
                "bias": "False",
                "dilation": "(1, 1)",
                "groups": "1",
                "in_channels": "3",
                "kernel_size": "(3, 3)",
                "out_channels": "8",
                "output_padding": "(0, 0)",
                "padding": "valid",
                "padding_mode": "zeros",
                "stride": "(2, 2)",
                "transposed": "False",
            },
        ),
        (nn.Linear(4, 2), {"bias": "True", "in_features": "4", "out_features": "2"}),
        (nn.LazyLinear(2), {"bias": "True", "in_features": "0", "out_features": "2"}),
        (
            nn.BatchNorm2d(5, momentum=None),
            {
                "affine": "True",
                "bias": "True",
                "eps": "1e-05",
                "momentum": "None",
                "num_features": "5",
                "track_running_stats": "True",
            },
        ),
        (
            Odd(),
            {
                "kind": "torch.bfloat16",
                "nested": "((1, 2), (3, None))",
                "nothing": "None",
                "number": "1e-05",
                "off": "False",
                "place": "cpu:1",
                "text": "mean",
            },
        ),
        (nn.Sequential(nn.ReLU()), {}),
        (nn.ReLU(inplace=True), {"inplace": "True"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_module_arguments_are_plain_values_as_texts(module, expected) -> None:
    """Plain public attributes, sorted by name; `bias` says whether there is one."""
    found = read_module_arguments(module)
    assert found == expected
    assert list(found) == sorted(found)


def test_module_arguments_with_an_unusual_bias() -> None:
    """A module whose `bias` is a setting keeps it as one; a part of that name is none."""
    assert read_module_arguments(nn.LSTM(2, 3, bias=False))["bias"] == "False"
    model = nn.Module()
    model.bias = nn.Linear(1, 1)
    assert read_module_arguments(model) == {}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.fc(x))


def test_arguments_are_recorded_with_each_forward_call(recorder, observed) -> None:
    """Under the name of the call, also of one that raises; nothing for the backward."""
    recorder.wants_arguments = True
    model = Net()
    with observed(model, recorder):
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(RuntimeError):
            model.fc(torch.ones(1, 3))
    at = "Default/network-Net/fc-Linear/Linear-op"
    linear = {"bias": "True", "in_features": "2", "out_features": "2"}
    root = {"Default/network-Net/Net-op0": {}}
    assert recorder.configured == root | {f"{at}{number}": linear for number in range(3)}


def test_arguments_are_not_read_if_not_wanted(recorder, observed, monkeypatch) -> None:
    """A plan without arguments never looks at a module's attributes."""

    def forbidden(module: nn.Module) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr("rankdump._frameworks.torch.model_hook.read_module_arguments", forbidden)
    monkeypatch.setattr(
        "rankdump._frameworks.torch.graph_description.read_module_arguments", forbidden
    )
    model = Net()
    with observed(model, recorder):
        model(torch.ones(1, 2))
    assert not recorder.configured
    assert not recorder.warnings
