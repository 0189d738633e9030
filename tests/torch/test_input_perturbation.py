"""Noise runs: the first floating input of each call of a model is moved by one ulp."""

from __future__ import annotations

import copy
import importlib
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from rankdump._core.determinism import (
    PERTURB_SETTING,
    find_perturbation_fault,
    read_perturbation,
)
from rankdump._core.record import TensorSide
from rankdump._frameworks.torch.input_perturbation import (
    TorchInputPerturbation,
    is_movable,
    move_by_ulp,
    replace_first,
)
from rankdump._frameworks.torch.model_hook import attach_model
from rankdump._recorder.declared_layouts import DeclaredLayouts
from rankdump._recorder.run_card_recorder import RunCardRecorder

TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Batch(NamedTuple):
    ids: Tensor
    scale: Tensor


class Words(nn.Module):
    """Takes token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


@pytest.fixture
def card(recorder: Any) -> RunCardRecorder:
    layouts = DeclaredLayouts(recorder.warn_once)
    recorder.card = RunCardRecorder(layouts, None, warn=recorder.warn_once, environ={})
    return recorder.card


def count_units(powers: Tensor) -> set[float]:
    """Return by how many units in the last place powers of two were moved."""
    unit = powers.double().abs() * torch.finfo(powers.dtype).eps
    return {*((move_by_ulp(powers).double() - powers.double()).abs() / unit).tolist()}


@pytest.mark.parametrize("dtype", TYPES)
def test_each_element_moves_by_one_unit_in_the_last_place(dtype: torch.dtype) -> None:
    powers = [sign * 2.0**n for n in range(-8, 8) for sign in (1, -1)]
    # Below a power of two, units are half as large.
    assert count_units(torch.tensor(powers, dtype=dtype)) == {0.5, 1.0}
    random = torch.rand(4096, generator=torch.Generator().manual_seed(0)).add(1).to(dtype)
    directions = (move_by_ulp(random) > random).double().mean()
    assert 0.3 < directions < 0.7


@pytest.mark.parametrize("dtype", TYPES)
def test_values_without_neighbours_stay(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    value = torch.tensor(
        [0.0, -0.0, torch.inf, -torch.inf, torch.nan, largest, -largest], dtype=dtype
    )
    moved = move_by_ulp(value)
    assert torch.equal(moved[:4], value[:4])
    assert moved[4].isnan()
    assert moved[5:].isfinite().all()
    assert move_by_ulp(torch.empty(0, 3, dtype=dtype)).shape == (0, 3)


def test_shards_and_views_move_as_the_whole_does() -> None:
    whole = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    moved = move_by_ulp(whole)
    assert torch.equal(torch.cat([move_by_ulp(part) for part in whole.split(2)]), moved)
    assert torch.equal(move_by_ulp(whole.T), moved.T)


def test_gradients_pass_through() -> None:
    value = torch.randn(5, requires_grad=True)
    (move_by_ulp(value) * torch.arange(5.0)).sum().backward()
    assert value.grad is not None
    assert torch.equal(value.grad, torch.arange(5.0))


def test_first_floating_tensor_of_nested_arguments_is_replaced() -> None:
    ids, scale, other = torch.arange(3), torch.rand(3), torch.rand(3)
    given = ([ids, {"a": Batch(ids, scale)}], other)
    replaced, found = replace_first(given, torch.neg)
    assert found is scale
    assert type(replaced[0][1]["a"]) is Batch
    assert torch.equal(replaced[0][1]["a"].scale, -scale)
    assert replaced[1] is other
    assert given[0][1]["a"].scale is scale  # type: ignore[index]
    assert replace_first((ids, "text", None), torch.neg)[1] is None
    assert not is_movable(torch.ones(2, dtype=torch.complex64))


def test_input_of_each_micro_batch_is_moved_and_the_batch_stays(
    recorder: Any, card: RunCardRecorder
) -> None:
    """What is recorded is what the model computes from, and the card says what was moved."""
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    hooks = attach_model(model, recorder, 0), TorchInputPerturbation(model, recorder, graph=0)
    for hook in hooks:
        hook.iteration_begins(0, True)
    batches = [torch.rand(2, 4), torch.rand(2, 4)]
    before = copy.deepcopy(batches)
    results = [model(batch) for batch in batches]
    assert all(map(torch.equal, batches, before))
    names = ("Default/network-Sequential/0-Linear/Linear-op0", "Linear-op1")
    for batch, name, result in zip(batches, names, results, strict=True):
        inputs = [
            each
            for each in recorder.taken
            if each.op_name.endswith(name) and each.side is TensorSide.INPUT
        ]
        assert inputs[0].data == move_by_ulp(batch).numpy().tobytes()
        assert torch.equal(result, model[1](model[0](move_by_ulp(batch))))
    assert card._settings[PERTURB_SETTING] == "1ulp: batch.0"
    for hook in reversed(hooks):
        hook.detach()
    assert torch.equal(model(batches[0]), model[1](model[0](batches[0])))
    assert recorder.warnings == []


def test_token_ids_are_left_and_the_embedding_is_moved(
    recorder: Any, card: RunCardRecorder
) -> None:
    model = Words()
    hooks = attach_model(model, recorder, 0), TorchInputPerturbation(model, recorder, graph=0)
    for hook in hooks:
        hook.iteration_begins(0, True)
    ids = torch.tensor([1, 7, 3])
    weight = model.embed.weight.detach().clone()
    model(ids).sum().backward()
    outputs = [each for each in recorder.taken if "embed" in each.op_name]
    expected = move_by_ulp(weight[ids])
    assert next(each.data for each in outputs if each.side is TensorSide.OUTPUT) == (
        expected.numpy().tobytes()
    )
    assert torch.equal(model.embed.weight, weight)
    assert model.embed.weight.grad is not None
    assert model.embed.weight.grad[7].any()
    assert card._settings[PERTURB_SETTING] == "1ulp: output.0 of the first Embedding"
    # A call that raises leaves nothing behind.
    with pytest.raises(IndexError):
        model(torch.tensor([99]))
    assert not torch.nn.modules.module._global_forward_hooks
    for hook in reversed(hooks):
        hook.detach()


def test_what_another_module_has_computed_is_not_moved_again(recorder: Any) -> None:
    """As the input of a loss, or of a later stage of a pipeline."""
    model, loss = nn.Linear(3, 2), nn.MSELoss()
    hooks = [TorchInputPerturbation(each, recorder, graph=0) for each in (model, loss)]
    x, y = torch.rand(4, 3), torch.zeros(4, 2)
    found = loss(model(x), y)
    for hook in hooks:
        hook.detach()
    assert torch.equal(found, loss(model(move_by_ulp(x)), y))
    assert recorder.warnings == []


@pytest.mark.parametrize("is_first", [True, False])
def test_only_the_first_stage_of_a_pipeline_is_moved(recorder: Any, is_first: bool) -> None:
    stage_class: Any = importlib.import_module(
        "torch.distributed.pipelining.stage"
    )._PipelineStageBase
    model, x = nn.Linear(3, 2), torch.rand(4, 3)

    class Stage(stage_class):
        def __init__(self) -> None:
            self.stage_index, self.num_stages = int(not is_first), 2

    Stage.__abstractmethods__ = frozenset()  # only its place in the pipeline is asked

    def forward(self: object, fwd_chunk_id: int) -> Tensor:
        return model(x)

    before = stage_class.forward_one_chunk
    stage_class.forward_one_chunk = forward
    hook = TorchInputPerturbation(model, recorder, graph=0)
    stage = Stage()
    assert stage.is_first is is_first
    try:
        found = stage.forward_one_chunk(fwd_chunk_id=0)
    finally:
        hook.detach()
        stage_class.forward_one_chunk = before
    assert torch.equal(found, model(move_by_ulp(x) if is_first else x))
    assert recorder.warnings == []


def test_nothing_to_move_is_one_warning(recorder: Any) -> None:
    class Counts(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            return ids + 1

    model = Counts()
    hook = TorchInputPerturbation(model, recorder, graph=0)
    assert model(torch.arange(2)).tolist() == [1, 2]
    assert len(recorder.warnings) == 1
    assert "nothing was moved" in recorder.warnings[0]
    hook.detach()


def test_shards_of_a_distributed_tensor_move_alone() -> None:
    """A DTensor stays one, with the same layout, and its zeros stay as other ranks need them."""
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        local = torch.rand(2, 3)
        whole = DTensor.from_local(local, mesh, [Shard(0)]).requires_grad_()
        moved = move_by_ulp(whole)
        assert isinstance(moved, DTensor)
        assert (moved.shape, moved.placements) == ((4, 3), (Shard(0),))
        assert torch.equal(moved.to_local(), move_by_ulp(local))
    finally:
        destroy_process_group()


def test_only_one_ulp_is_allowed() -> None:
    assert read_perturbation({"RANKDUMP_PERTURB": "1ulp"}) == "1ulp"
    assert read_perturbation({}) == find_perturbation_fault({}) == ""
    assert read_perturbation({"RANKDUMP_PERTURB": "2ulp"}) == ""
    assert find_perturbation_fault({"RANKDUMP_PERTURB": "2ulp"}) == (
        "RANKDUMP_PERTURB='2ulp' is not allowed; allowed: 1ulp"
    )
