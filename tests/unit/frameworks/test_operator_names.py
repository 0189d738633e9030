"""Names of operators, and slots of arguments and results."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from rankdump._frameworks import operator_names
from rankdump._frameworks.operator_names import (
    OperatorScope,
    list_call_leaves,
    list_result_leaves,
    make_scope,
)


class Pair(NamedTuple):
    hidden: Any
    cell: Any


@dataclass
class Output:
    logits: Any
    loss: Any = None


@dataclass
class ModelOutput(OrderedDict):
    """As Hugging Face does it: a mapping that hides the fields that are None."""

    logits: Any = None
    loss: Any = None

    def __post_init__(self) -> None:
        if self.logits is not None:
            self["logits"] = self.logits
        if self.loss is not None:
            self["loss"] = self.loss


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ([("", "Net")], "Default/network-Net/Net-op3"),
        (
            [("", "Net"), ("layers", "ModuleList"), ("0", "Block"), ("conv1", "Conv2d")],
            "Default/network-Net/layers-ModuleList/0-Block/conv1-Conv2d/Conv2d-op3",
        ),
        ([("", "Net"), ("a/b", "C/D")], "Default/network-Net/a_b-C_D/C_D-op3"),
    ],
)
def test_scope_makes_names_of_calls(parts: list[tuple[str, str]], name: str) -> None:
    """A name has every module from the root down, then the class and the call's number."""
    scope = make_scope(parts)
    assert scope.forward_name(3) == name
    assert scope.call_names(3).gradient == "Gradients/" + name
    assert scope.call_names(3).recomputation == "Recompute/" + name


def test_scope_is_hashable_by_value() -> None:
    assert make_scope([("", "Net")]) == OperatorScope("network-Net", "Net")


def shown(leaves: list[operator_names.CallLeaf]) -> list[tuple[int, str, object]]:
    return [(leaf.slot, leaf.argument, leaf.value) for leaf in leaves]


def test_call_leaves_number_tensors_and_other_values() -> None:
    """Every leaf takes a slot, tensor or not: positional first, then keywords in their order."""
    leaves = list_call_leaves((1, (None, [2, "x"])), {"mask": 3, "cache": {"k": 4, 7: 5}})
    assert shown(leaves) == [
        (0, "args.0", 1),
        (1, "args.1.0", None),
        (2, "args.1.1.0", 2),
        (3, "args.1.1.1", "x"),
        (4, "kwargs.mask", 3),
        (5, "kwargs.cache.k", 4),
        (6, "kwargs.cache.7", 5),
    ]


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (1, [(0, "out", 1)]),
        (None, [(0, "out", None)]),
        ((), []),
        ((1, 2), [(0, "out.0", 1), (1, "out.1", 2)]),
        (Pair(1, (2,)), [(0, "out.hidden", 1), (1, "out.cell.0", 2)]),
        (Output(1), [(0, "out.logits", 1), (1, "out.loss", None)]),
        (ModelOutput(loss=2), [(0, "out.logits", None), (1, "out.loss", 2)]),
        ({(1, 2): 3}, [(0, "out.0", 3)]),
        (Output, [(0, "out", Output)]),
        ({1, 2}, [(0, "out", {1, 2})]),
    ],
)
def test_result_leaves_have_slots_and_arguments(
    result: object, expected: list[tuple[int, str, object]]
) -> None:
    """Tuples, named tuples, mappings and dataclasses are walked; anything else is a leaf."""
    assert shown(list_result_leaves(result)) == expected


def test_result_leaves_of_empty_optional_fields_keep_their_slots() -> None:
    """A field that is None still takes its slot."""
    full, partial = ModelOutput(logits=1, loss=2), ModelOutput(loss=2)
    assert list_result_leaves(full)[1] == list_result_leaves(partial)[1]


def test_leaves_of_cyclic_and_deep_containers_end() -> None:
    """A container inside itself, and one nested too deep, is a leaf."""
    loop: list[object] = [1]
    loop.append(loop)
    assert [leaf.argument for leaf in list_result_leaves(loop)] == ["out.0", "out.1"]
    deep: object = 1
    for _ in range(1000):
        deep = [deep]
    (leaf,) = list_result_leaves(deep)
    assert leaf.argument.count(".") == operator_names.MAX_DEPTH


def test_leaves_of_a_repeated_container_are_listed_twice() -> None:
    """Only a cycle is cut; the same list in two places is walked in both."""
    twice = [1]
    arguments = [leaf.argument for leaf in list_result_leaves((twice, twice))]
    assert arguments == ["out.0.0", "out.1.0"]
