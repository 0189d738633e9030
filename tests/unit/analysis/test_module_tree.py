"""Modules from names of operators, with the worst of what is in them."""

from __future__ import annotations

from rankdump._analysis.module_tree import (
    OperatorTensor,
    TensorSeverity,
    find_module,
    make_module_tree,
)

ABOVE = "Default/network-Net/encoder-Encoder"


def tensor(name: str, maximum: float | None = 1.0, nonfinite: int = 0) -> OperatorTensor:
    values = (1.0, maximum, -1.0, nonfinite, 4)
    return OperatorTensor(name, "Linear", "output", 0, "float32", (2, 3), (), *values)


def test_modules_have_the_worst_of_what_is_in_them():
    root = make_module_tree(
        [
            tensor(f"{ABOVE}/0-Linear/Linear-op0"),
            tensor(f"{ABOVE}/1-Linear/Linear-op0", maximum=70000.0),
            tensor("Default/network-Net/head-Linear/Linear-op0", nonfinite=2),
            tensor("Gradients/encoder.0.weight", maximum=None),
        ]
    )
    assert list(root.children) == ["encoder", "head", "Gradients"]
    assert (root.tensor_count, root.nonfinite, root.large) == (4, 1, 1)
    encoder = find_module(root, "encoder")
    assert encoder is not None
    assert (encoder.severity, list(encoder.children)) == (TensorSeverity.LARGE, ["0", "1"])
    assert find_module(root, "head/Linear-op0").severity is TensorSeverity.NONFINITE  # type: ignore[union-attr]
    weight = find_module(root, "Gradients/encoder/0/weight")
    assert weight is not None
    assert (weight.severity, len(weight.tensors)) == (TensorSeverity.NONE, 1)


def test_absent_module_is_none():
    root = make_module_tree([tensor(f"{ABOVE}/0-Linear/Linear-op0")])
    assert find_module(root, "") is root
    assert find_module(root, "encoder/1") is None
    assert find_module(root, "encoder//0") is None
