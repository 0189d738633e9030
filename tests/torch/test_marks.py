"""`set_dump` for torch modules."""

# torch types what stands in a module as `Tensor | Module`, and compiled modules as functions.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportIndexIssue=false

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from rankdump._frameworks.torch.model_hook import attach_model
from rankdump._frameworks.torch.module_tree import build_module_tree
from rankdump._frameworks.torch.parameters import module_marks, set_dump


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2, affine=False), nn.ReLU())
        )
        self.head = nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


BODY = "network-Net/body-Sequential"
BLOCK = BODY + "/1-Sequential"
ON_BLOCK = frozenset(
    {
        BLOCK,
        BLOCK + "/0-BatchNorm1d",
        BLOCK + "/1-ReLU",
        "body.1.0.running_mean",
        "body.1.0.running_var",
        "body.1.0.num_batches_tracked",
    }
)
ON_LINEAR = frozenset({BODY + "/0-Linear", "body.0.weight", "body.0.bias"})


def told(model: nn.Module, recorder) -> frozenset[str]:
    """What the recorder is told when an iteration is armed."""
    hook = attach_model(model, recorder, 0)
    hook.iteration_begins(0, armed=True)
    hook.detach()
    return recorder.marks[-1]


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([], frozenset()),
        ([("head", True)], {"network-Net/head-Linear", "head.weight"}),
        ([("body.1", True)], ON_BLOCK),
        ([("body", True)], ON_BLOCK | ON_LINEAR | {BODY}),
        ([("body", True), ("body.1", False)], ON_LINEAR | {BODY}),
        ([("body.1", False), ("body", True)], ON_BLOCK | ON_LINEAR | {BODY}),
        (
            [("body", True), ("body.1", False), ("body.1.1", True)],
            ON_LINEAR | {BODY, BLOCK + "/1-ReLU"},
        ),
        ([("head", True), ("", False)], frozenset()),
    ],
)
def test_set_dump_counts_the_last_call_for_each_module(recorder, calls, expected) -> None:
    """A mark covers the modules inside, with their own tensors; a later call overrides it."""
    model = Net()
    for path, enabled in calls:
        set_dump(model.get_submodule(path), enabled)
    assert told(model, recorder) == expected


def test_set_dump_enables_by_default_and_accepts_wrappers(recorder) -> None:
    """Marking a wrapper, or the model inside it, has the same effect."""
    inside, outside = nn.DataParallel(Net()), nn.DataParallel(Net())
    set_dump(inside.module.head)
    set_dump(outside)
    assert told(inside, recorder) == {"network-Net/head-Linear", "head.weight"}
    assert told(outside, recorder) == ON_BLOCK | ON_LINEAR | {
        BODY,
        "network-Net",
        "network-Net/head-Linear",
        "head.weight",
    }


def test_shared_parameter_is_marked_with_either_owner(recorder) -> None:
    """It is known under its first name, whichever of its owners carries the mark."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    set_dump(model[1])
    assert told(model, recorder) == {"network-Sequential/1-Linear", "0.weight"}


def test_mark_takes_effect_at_the_next_call(recorder) -> None:
    """A mark set while an iteration runs reaches the recorder before the next operator."""
    model, x = Net(), torch.ones(2, 2)
    hook = attach_model(model, recorder, 0)
    hook.iteration_begins(0, armed=True)
    seen: list[frozenset[str]] = []
    recorder.wanted = lambda name, side: bool(seen.append(recorder.marks[-1]))
    for enabled in (True, False):
        set_dump(model.head, enabled)
        assert not seen
        model(x)
        assert {bool(names) for names in seen} == {enabled}
        seen.clear()
    set_dump(model.head)
    hook.iteration_ends(0, armed=True)  # asks for parameters
    assert {bool(names) for names in seen} == {True}
    told = len(recorder.marks)
    model(x)
    hook.iteration_begins(1, armed=False)
    assert len(recorder.marks) == told == 4
    hook.iteration_begins(2, armed=True)
    assert len(recorder.marks) == 5
    hook.detach()


@pytest.mark.parametrize("target", [None, "head", Net, torch.ones(1), 3])
def test_set_dump_accepts_only_modules(target) -> None:
    """Anything else is refused with ValueError, as in MindSpore."""
    with pytest.raises(ValueError, match=r"set_dump: target of type .* is not allowed"):
        set_dump(target)


@pytest.mark.parametrize("enabled", [1, 0, "true", None])
def test_set_dump_accepts_only_true_and_false(enabled) -> None:
    """A number or a text is rejected, and changes no mark."""
    model = Net()
    with pytest.raises(ValueError, match=f"set_dump: enabled={enabled!r} is not allowed"):
        set_dump(model, enabled)
    assert not module_marks.list_marked_names(model, build_module_tree(model))


def test_marks_keep_no_module_alive() -> None:
    """The marks of a freed model are removed."""
    before = len(module_marks._by_module)
    model = Net()
    set_dump(model)
    assert len(module_marks._by_module) > before
    del model
    gc.collect()
    assert len(module_marks._by_module) == before
