"""Dropout that drops nothing, as an API call."""

# pyright: reportArgumentType=false

from __future__ import annotations

import pytest
import torch
from support.watching import watched
from torch import nn
from torch.nn import functional

from rankdump._frameworks.torch.apis.function_patches import without_dropout

SHAPES = {
    "dropout": (24,),
    "dropout1d": (1, 6, 4),
    "dropout2d": (1, 6, 2, 2),
    "dropout3d": (1, 3, 2, 2, 2),
    "alpha_dropout": (24,),
    "feature_alpha_dropout": (1, 6, 4),
}


@pytest.fixture
def restored(monkeypatch) -> None:
    """Have torch's functions again after the test."""
    for name in SHAPES:
        monkeypatch.setattr(functional, name, getattr(functional, name))


class Dropping(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(functional, self.name)(x, p=0.5) + 1


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("name", SHAPES)
def test_functional_dropout_that_drops_nothing_is_still_a_call(recorder, name) -> None:
    """Each call has records of inputs, outputs and gradient, and its source line."""
    imported = getattr(functional, name)
    model = Dropping(name)
    without_dropout(model)
    x = torch.arange(1.0, 25.0).reshape(SHAPES[name]).requires_grad_()
    with watched(recorder, model, retain_backward=True):
        model(x).sum().backward()
        imported(x.detach(), p=0.5)
    stem = f"Functional_{name}"
    taken = {(t.op_name, t.argument): t for t in recorder.taken if t.op_type == stem}
    assert list(taken) == [
        (f"{stem}_0_forward", "input.0"),
        (f"{stem}_0_forward", "output"),
        (f"{stem}_0_backward", "input"),
        (f"{stem}_1_forward", "input.0"),
        (f"{stem}_1_forward", "output"),
    ]
    for number in (0, 1):
        read, wrote = (taken[f"{stem}_{number}_forward", side] for side in ("input.0", "output"))
        assert wrote.array.tolist() == read.array.tolist() == x.tolist()
    innermost = recorder.stacks[f"{stem}_0_forward"][0]
    assert innermost.startswith(f"File {__file__}, line ")
    assert "in forward" in innermost
