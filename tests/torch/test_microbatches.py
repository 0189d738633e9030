"""Micro-batches and phases of forward passes, and of the gradients that belong to them."""

# torch types what stands in a module as `Tensor | Module`.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportPrivateUsage=false, reportMissingTypeArgument=false

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.process_groups import end_group
from torch import Tensor, nn
from torch.distributed.pipelining import schedules, stage
from torch.utils.checkpoint import checkpoint

from rankdump._core.recorder_protocol import ForwardPass
from rankdump._frameworks.torch import forward_passes
from rankdump._frameworks.torch.forward_passes import (
    CHUNK_METHODS,
    AccumulationCounter,
    choose_microbatch,
    find_phase,
    pipeline_stage_patch,
)
from rankdump._frameworks.torch.internals import has_deferred_sync, is_syncing_module
from rankdump._frameworks.torch.model_hook import attach_model

NET = "Default/network-Net"


class Net(nn.Module):
    """A frozen part beside one that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(2, 2)
        self.student = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        return self.student(x) - target


def passes(recorder, part: str = "") -> set[tuple[int | None, str]]:
    """Return the passes of tensors whose operator's name contains `part`."""
    return {tuple(taken.forward_pass) for taken in recorder.taken if part in taken.op_name}


def calls(recorder, number: int, start: str) -> set[tuple[int | None, str]]:
    """Return the passes of the tensors of every operator's call of that number."""
    return {
        tuple(taken.forward_pass)
        for taken in recorder.taken
        if taken.op_name.startswith(start) and taken.op_name.endswith(f"-op{number}")
    }


def run(model: nn.Module, *, count: int = 1) -> Tensor:
    """Run forward and backward passes."""
    loss = torch.zeros(())
    for _ in range(count):
        loss = model(torch.ones(3, 2, requires_grad=True)).sum()
        loss.backward()
    return loss


# -- decisions


@pytest.mark.parametrize(
    ("declared", "chunk", "accumulated", "expected"),
    [
        (7, 2, 1, 7),
        (None, 2, 1, 2),
        (None, 0, None, 0),
        (None, None, 0, 0),
        (None, None, None, None),
    ],
)
def test_microbatch_is_chosen_by_who_knows_best(declared, chunk, accumulated, expected):
    found = choose_microbatch(declared=declared, chunk=chunk, accumulated=accumulated)
    assert found == expected


@pytest.mark.parametrize("has_grad", [True, False])
@pytest.mark.parametrize("in_function", [True, False])
def test_eval_wins_over_every_gradient_mode(monkeypatch, has_grad, in_function):
    monkeypatch.setattr(forward_passes, "is_inside_function", lambda: in_function)
    assert find_phase(is_eval=True, has_grad=has_grad) == "eval"


@pytest.mark.parametrize(
    ("has_grad", "in_function", "expected"),
    [(True, False, ""), (True, True, ""), (False, True, ""), (False, False, "no_grad")],
)
def test_phase_of_training_mode(monkeypatch, has_grad, in_function, expected):
    monkeypatch.setattr(forward_passes, "is_inside_function", lambda: in_function)
    assert find_phase(is_eval=False, has_grad=has_grad) == expected


def test_accumulation_is_counted_from_its_first_deferred_pass_to_the_end_of_the_iteration():
    """Law: the last pass, which communicates, continues the count; the next iteration is new."""
    counter = AccumulationCounter()
    assert [counter.count_pass(deferred=d) for d in (True, True, False)] == [0, 1, 2]
    counter.restart()
    assert [counter.count_pass(deferred=d) for d in (False, True)] == [None, 1]


# -- phases


def test_training_pass_has_no_phase_and_its_frozen_part_has(recorder, observed):
    model = Net()
    with observed(model, recorder):
        model(torch.ones(3, 2)).sum().backward()
    assert passes(recorder, "teacher-Linear") == {(None, "no_grad")}
    assert passes(recorder, "student-Linear") == {(None, "")}
    assert passes(recorder, "Gradients/") == {(None, "")}
    assert calls(recorder, 0, NET) - passes(recorder, "teacher-Linear") == {(None, "")}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_pass_without_gradients_is_no_grad(recorder, observed, mode):
    model = Net()
    with observed(model, recorder), mode():
        model(torch.ones(3, 2))
    assert passes(recorder, NET) == {(None, "no_grad")}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_pass_in_eval_mode_is_eval_in_every_part(recorder, observed, mode):
    model = Net().eval()
    with observed(model, recorder), mode():
        model(torch.ones(3, 2))
    assert passes(recorder, NET) == {(None, "eval")}


def test_part_in_eval_mode_does_not_change_a_training_pass(recorder, observed):
    """A frozen normalisation is in eval mode while everything around it trains."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval())
    with observed(model, recorder):
        run(model)
    assert passes(recorder) == {(None, "")}


def test_gradients_of_a_pass_in_eval_mode_belong_to_it(recorder, observed):
    """The discriminator of a GAN may be in eval mode while the generator trains through it."""
    model = nn.Linear(2, 2).eval()
    with observed(model, recorder):
        run(model)
    assert passes(recorder, "Gradients/Default/network") == {(None, "eval")}
    parameters = {t.op_name: t.forward_pass for t in recorder.taken if "network" not in t.op_name}
    assert set(parameters) == {"weight", "bias", "Gradients/weight", "Gradients/bias"}
    assert set(parameters.values()) == {ForwardPass()}


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_region_trains(recorder, observed, use_reentrant):
    """Law: reentrant checkpointing switches gradients off, and yet its calls are trained."""

    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=use_reentrant)

    recorder.declared_pass = ForwardPass(4)
    model = Region()
    with observed(model, recorder):
        run(model)
    names = {taken.op_name.split("/")[0] for taken in recorder.taken}
    assert "Recompute" in names
    states = ("weight", "bias")
    assert {t.forward_pass for t in recorder.taken if not t.op_name.endswith(states)} == {
        ForwardPass(4)
    }


def test_model_called_through_reentrant_checkpointing_trains(recorder, observed):
    model = nn.Linear(2, 2)
    with observed(model, recorder):
        checkpoint(model, torch.ones(1, 2, requires_grad=True), use_reentrant=True).sum().backward()
    assert passes(recorder) == {(None, "")}


def test_phase_is_that_of_the_thread(recorder, observed):
    """Law: an evaluation in one thread does not change a training pass in another."""
    entered, left = threading.Event(), threading.Event()

    class Waiting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            if not torch.is_grad_enabled():
                entered.set()
                assert left.wait(60)
            return x * self.weight

    model = Waiting()

    def evaluate() -> None:
        with torch.no_grad():
            model(torch.ones(1, 2))

    with observed(model, recorder):
        thread = threading.Thread(target=evaluate)
        thread.start()
        assert entered.wait(60)
        run(model)
        left.set()
        thread.join()
    name = "Default/network-Waiting/Waiting-op"
    assert {t.forward_pass.phase for t in recorder.taken if t.op_name == f"{name}0"} == {"no_grad"}
    assert {t.forward_pass.phase for t in recorder.taken if t.op_name == f"{name}1"} == {""}


# -- numbers that the script declares


def test_gradients_have_the_declared_number_of_their_own_forward(recorder, observed):
    """Law: the backward of a micro-batch may run after the forward of others, as in 1F1B."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with observed(model, recorder):
        losses = []
        for index in range(3):
            recorder.declared_pass = ForwardPass(index)
            losses.append(model(torch.ones(1, 2, requires_grad=True)).sum())
        for loss in (losses[1], losses[0], losses[2]):
            loss.backward()
    for index in range(3):
        for start in (NET.replace("Net", "Sequential"), "Gradients/Default/"):
            assert calls(recorder, index, start) == {(index, "")}
    assert passes(recorder, "0.weight") == {(None, "")}


def test_several_passes_have_no_number_unless_somebody_declares_one(recorder, observed):
    """The discriminator of a GAN runs forward and backward twice before its optimizer steps."""
    model = nn.Linear(2, 2)
    with observed(model, recorder):
        run(model, count=2)
    assert passes(recorder) == {(None, "")}
    assert len({taken.op_name for taken in recorder.taken if "/Linear-op" in taken.op_name}) == 4


# -- accumulation


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group(
        "gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1
    )
    yield
    end_group()


def accumulate(model: nn.Module, deferred: Callable[[bool], object], count: int = 3) -> None:
    for index in range(count):
        deferred(index < count - 1)
        run(model)


@pytest.mark.parametrize("outside", [True, False])
def test_passes_under_no_sync_of_ddp_are_numbered(group, recorder, observed, outside):
    """Law: with the model attached before or after it was wrapped, the last pass counts too."""
    net = nn.Linear(2, 2)
    model = nn.parallel.DistributedDataParallel(net)
    with observed(net if outside else model, recorder):
        with model.no_sync():
            run(model, count=2)
        run(model)
        with torch.no_grad():
            model(torch.ones(1, 2))
    for index in range(3):
        assert calls(recorder, index, "Default/") == {(index, "")}
        assert calls(recorder, index, "Gradients/Default/") == {(index, "")}
    assert calls(recorder, 3, "Default/") == {(None, "no_grad")}
    assert passes(recorder, "Gradients/weight") == {(None, "")}


def test_passes_of_fully_shard_without_sync_are_numbered(group, recorder, observed):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mesh = init_device_mesh("cpu", (1,))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    with observed(model, recorder):
        accumulate(model, lambda on: model.set_requires_gradient_sync(not on))
    for index in range(3):
        assert calls(recorder, index, "Default/") == {(index, "")}


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_passes_under_no_sync_of_fsdp_are_numbered(group, recorder, observed):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    with observed(model, recorder):
        with model.no_sync():
            run(model, count=2)
        run(model)
    for index in range(3):
        assert calls(recorder, index, "Default/") == {(index, "")}


def test_next_iteration_counts_anew(group, recorder):
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    hook = attach_model(model, recorder, 0)
    for iteration in range(2):
        hook.iteration_begins(iteration, armed=True)
        with model.no_sync():
            run(model)
        run(model)
        hook.iteration_ends(iteration, armed=True)
    hook.detach()
    first = [t.forward_pass.microbatch for t in recorder.taken if t.op_name.endswith("/Linear-op0")]
    assert set(first) == {0}


def test_modules_without_synchronisation_are_never_deferred():
    assert not is_syncing_module(nn.Linear(2, 2))
    assert not has_deferred_sync(nn.Linear(2, 2))


# -- pipeline schedules


def methods() -> list[object]:
    owners = {"stage": stage, "schedules": schedules}
    return [
        vars(getattr(owners[method.module.rpartition(".")[2]], method.class_name))[method.name]
        for method in CHUNK_METHODS
    ]


def test_methods_of_pipelines_are_replaced_only_while_a_model_is_recorded(recorder):
    """Law: the last model that stops restores what torch had."""
    before = methods()
    first, second = (attach_model(nn.Linear(1, 1), recorder, graph) for graph in range(2))
    assert methods() == before
    first.iteration_begins(0, armed=True)
    second.iteration_begins(0, armed=True)
    assert not set(before) & set(methods())
    assert methods()[0].__wrapped__ is before[0]
    first.iteration_begins(1, armed=False)
    assert methods() != before
    second.detach()
    assert methods() == before
    first.detach()


class Chunks(stage._PipelineStageBase):  # pyright: ignore[reportUntypedBaseClass]
    """The smallest stage: it runs a module, without a process group."""

    def __init__(self, module: nn.Module) -> None:
        self.submod = module
        self.is_first = self.is_last = True  # pyright: ignore[reportIncompatibleMethodOverride]
        self._runtime_validate = False
        self.log_prefix = ""
        self.output_chunks: list[Tensor] = []
        self.fwd_cache: dict = {}

    is_first = is_last = False  # pyright: ignore[reportAssignmentType]

    def _prepare_forward_infra(self, *args, **kwargs):
        raise NotImplementedError

    def _prepare_backward_infra(self, *args, **kwargs):
        raise NotImplementedError

    def _create_grad_recv_info(self, *args, **kwargs):
        raise NotImplementedError


@pytest.mark.parametrize("by_keyword", [True, False])
def test_calls_of_a_chunk_have_its_number(recorder, observed, by_keyword):
    """Law: also its gradients, which arrive while no chunk runs; afterwards there is none."""
    model = nn.Linear(2, 2)
    chunks = Chunks(model)
    with observed(model, recorder):
        for chunk in (2, 0):
            x = (torch.ones(1, 2, requires_grad=True),)
            if by_keyword:
                chunks.forward_one_chunk(fwd_chunk_id=chunk, args=x)
            else:
                chunks.forward_one_chunk(chunk, x)
        assert pipeline_stage_patch.running_chunk is None
        for output in reversed(chunks.output_chunks):
            output.sum().backward()
        run(model)
    for index, number in enumerate((2, 0, None)):
        for start in ("Default/", "Gradients/Default/"):
            assert calls(recorder, index, start) == {(number, "")}


def test_loss_of_a_chunk_has_its_number(recorder, observed):
    loss = nn.MSELoss()
    schedule = SimpleNamespace(_loss_fn=loss, _internal_losses=[], _compute_loss=loss)
    schedule._compute_loss = lambda output, target, kwargs: loss(output, target)
    data = torch.ones(2, requires_grad=True)
    with observed(loss, recorder):
        compute = schedules._PipelineSchedule._maybe_compute_loss
        compute(schedule, SimpleNamespace(is_last=True), data, [data] * 6, 5)
    assert passes(recorder) == {(5, "")}


def test_error_in_a_chunk_is_passed_through_and_ends_it(recorder, observed):
    model = nn.Linear(2, 2)
    with observed(model, recorder):
        with pytest.raises(RuntimeError, match="failed to run forward"):
            Chunks(model).forward_one_chunk(1, (torch.ones(1, 5),))
        assert pipeline_stage_patch.running_chunk is None


# -- triggers that hold observations


def test_held_tensors_keep_the_number_of_their_call(deciding, observed):
    """Law: what is read when an operator raised has the number that it began with."""

    class Raising(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            deciding.declared_pass = ForwardPass(9)
            raise ValueError(x)

    deciding.by_reference = True
    deciding.declared_pass = ForwardPass(3)
    model = Raising()
    with observed(model, deciding), pytest.raises(ValueError, match="tensor"):
        model(torch.ones(1))
    assert [taken.forward_pass for taken in deciding.taken] == [ForwardPass(3)]
