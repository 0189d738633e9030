"""Gathered parameters, and gradients before reduction, of one rank; jobs of several are in
tests/jobs.
"""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.process_groups import end_group
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from rankdump._core.record import TensorSide
from rankdump._frameworks.torch.data_parallel import DataParallelHook
from rankdump._frameworks.torch.model_hook import TorchModelHook

WEIGHT = "Gradients/weight"


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group(
        "gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1
    )
    yield
    end_group()


def finish(tensor: Tensor) -> torch.futures.Future[Tensor]:
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(tensor)
    return done


def replicate(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """Reduce with a factor of 100, to tell apart what was reduced."""
    replica = DistributedDataParallel(model, **options)
    # torch rejects annotations that are texts.
    replica.register_comm_hook(None, lambda state, bucket: finish(bucket.buffer().mul_(100)))
    return replica


class Observation:
    """A model and its hook, in armed iterations."""

    def __init__(self, recorder: Any, model: nn.Module, observed: nn.Module | None = None) -> None:
        self.recorder = recorder
        self.names = TorchModelHook(model, recorder, 0)
        self.hook = DataParallelHook(observed or model, recorder, lambda: [self.names])
        self.hook.iteration_begins(0, armed=True)

    def end(self) -> dict[tuple[str, int], np.ndarray]:
        """Return the inputs that were recorded."""
        self.hook.iteration_ends(0, armed=True)
        self.hook.detach()
        assert not self.recorder.lost
        assert all(taken.side is TensorSide.INPUT for taken in self.recorder.taken)
        return {(taken.op_name, taken.slot): taken.array for taken in self.recorder.taken}


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}])
def test_gradients_are_those_before_the_reduction(recorder, options) -> None:
    inner = nn.Linear(3, 2, bias=False)
    model = replicate(inner, **options)
    watched = Observation(recorder, model)
    model(torch.ones(2, 3)).sum().backward()
    assert inner.weight.grad is not None
    assert torch.equal(inner.weight.grad, torch.full((2, 3), 200.0))
    found = watched.end()
    assert list(found) == [(WEIGHT, 0)]
    np.testing.assert_array_equal(found[WEIGHT, 0], np.full((2, 3), 2.0))
    assert not recorder.warnings


@pytest.mark.parametrize("options", [{}, {"static_graph": True}])
def test_each_reduction_has_its_own_slot(recorder, options) -> None:
    """The second one reduces what the first one left, and the gradient of its own backward."""
    model = replicate(nn.Linear(3, 2, bias=False), **options)
    watched = Observation(recorder, model)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
    found = watched.end()
    assert [found[WEIGHT, slot][0, 0] for slot in range(2)] == [1, 101]
    assert len(found) == 2


def test_backwards_without_reduction_are_part_of_the_next_one(recorder) -> None:
    model = replicate(nn.Linear(3, 2, bias=False))
    watched = Observation(recorder, model)
    with model.no_sync():
        model(torch.ones(1, 3)).sum().backward()
    assert not recorder.taken
    model(torch.ones(1, 3)).sum().backward()
    found = watched.end()
    assert list(found) == [(WEIGHT, 0)]
    np.testing.assert_array_equal(found[WEIGHT, 0], np.full((2, 3), 2.0))


class Shared(nn.Module):
    """One layer is used twice, another one never."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 3, bias=False)
        self.unused = nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) + self.used(x)


def test_parameter_that_is_used_twice_has_one_gradient(recorder) -> None:
    """One that the backward does not reach has none."""
    model = replicate(Shared(), find_unused_parameters=True)
    watched = Observation(recorder, model)
    model(torch.ones(1, 3)).sum().backward()
    found = watched.end()
    assert list(found) == [("Gradients/used.weight", 0)]
    np.testing.assert_array_equal(found["Gradients/used.weight", 0], np.full((3, 3), 2.0))


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
@pytest.mark.parametrize("originals", [False, True])
def test_flat_parameter_is_read_whole_and_before_each_reduction(recorder, originals) -> None:
    """FSDP1 names a flat parameter of its own, or the original ones; one rank shards nothing."""
    layer = nn.Linear(3, 2)
    with torch.no_grad():
        layer.weight.fill_(0.5)
    model = FullyShardedDataParallel(
        layer, use_orig_params=originals, device_id=torch.device("cpu")
    )
    watched = Observation(recorder, model)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
    found = watched.end()
    names = ["weight", "bias"] if originals else ["_flat_param"]
    slots = [(f"Gradients/{name}", slot) for name in names for slot in range(2)]
    assert sorted(found) == sorted([*((name, 0) for name in names), *slots])
    np.testing.assert_array_equal(found[names[0], 0].ravel()[:6], np.full(6, 0.5))
    for slot in range(2):
        np.testing.assert_array_equal(found[f"Gradients/{names[0]}", slot].ravel()[:6], slot + 1)


def test_each_reduction_of_fsdp2_has_its_own_slot(recorder) -> None:
    model: Any = nn.Linear(3, 2, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    watched = Observation(recorder, model)
    for scale in (1, 2):
        model(torch.full((1, 3), float(scale))).sum().backward()
    found = watched.end()
    assert sorted(found) == [(WEIGHT, 0), (WEIGHT, 1), ("weight", 0)]
    assert [found[WEIGHT, slot][0, 0] for slot in range(2)] == [1, 2]


def count_hooks(model: nn.Module) -> int:
    hooks = (getattr(each, "_post_accumulate_grad_hooks", None) for each in model.parameters())
    return sum(map(len, filter(None, hooks)))


def test_nothing_is_left_where_nothing_is_dumped(recorder) -> None:
    model = replicate(nn.Linear(3, 2))
    watched = Observation(recorder, model)
    assert count_hooks(model) == 2
    watched.hook.iteration_begins(1, armed=False)
    assert count_hooks(model) == 0
    watched.hook.iteration_begins(2, armed=True)
    watched.hook.iteration_begins(3, armed=True)
    assert count_hooks(model) == 2
    watched.hook.detach()
    assert count_hooks(model) == 0


def test_gradients_that_are_not_selected_are_not_read(recorder) -> None:
    recorder.wanted = lambda name, side: name == "Gradients/bias" and side is TensorSide.INPUT
    model = replicate(nn.Linear(3, 2), static_graph=True)
    watched = Observation(recorder, model)
    model(torch.ones(1, 3)).sum().backward()
    assert list(watched.end()) == [("Gradients/bias", 0)]


def test_model_without_a_wrapper_is_one_warning(recorder) -> None:
    """The script gave the module inside of the wrapper."""
    model = nn.Linear(3, 2)
    watched = Observation(recorder, replicate(model), model)
    model(torch.ones(1, 3)).sum().backward()
    assert watched.end() == {}
    (warning,) = recorder.warnings
    assert warning.startswith("data_parallel(Linear): the model has no DistributedDataParallel")
