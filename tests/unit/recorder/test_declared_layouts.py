"""Declared layouts reach their tensors and the gradients of these."""

from __future__ import annotations

import numpy as np

from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import TensorObservation
from rankdump._frameworks.arrays import ArraySource
from rankdump._recorder.declared_layouts import DeclaredLayouts, LayoutDeclaration, declare_layout


def observe(
    layouts: DeclaredLayouts, name: str, side: TensorSide, slot: int = 0, extent: int = 2
) -> str:
    source = ArraySource(np.zeros(extent))
    layouts.apply_to(TensorObservation(0, "Op", name, side, slot, "", source))
    return str(source.layout)


def test_declared_layout_covers_a_tensor_and_its_gradient() -> None:
    warnings: list[str] = []
    layouts = DeclaredLayouts(warnings.append)
    assert not layouts.declarations
    declared = declare_layout(1, (4,), {"tp": 2}, {"tp": "Shard(0)"})
    assert isinstance(declared, LayoutDeclaration)
    layouts.add("weight", TensorSide.OUTPUT, 0, declared)
    layouts.add("Default/fc/Linear-op0", TensorSide.OUTPUT, 1, declared)
    held, whole = "tp 1/2 Shard(0) of [4]", "None"
    inside, out = TensorSide.INPUT, TensorSide.OUTPUT
    assert observe(layouts, "weight", out) == held
    assert observe(layouts, "Gradients/weight", out) == held
    assert observe(layouts, "bias", out) == whole
    operator = "Default/fc/Linear-op0"
    assert [observe(layouts, operator, out, slot) for slot in (0, 1)] == [whole, held]
    assert observe(layouts, f"Gradients/{operator}", inside, 1) == held
    assert observe(layouts, f"Gradients/{operator}", out, 1) == whole
    assert warnings == []
    assert observe(layouts, "weight", out, extent=3) == whole
    assert warnings == [
        "layout of weight output 0 is not recorded: "
        "shape [3] is not that of a part of [4] under Shard(0)"
    ]
