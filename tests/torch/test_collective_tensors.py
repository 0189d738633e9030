"""Tensors of collectives in a group of one rank: which ones a recorder gets, and when."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from support.process_groups import end_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankdump._core.events import EventKind
from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import IterationHook
from rankdump._frameworks.torch.collective_tensors import (
    CollectiveTensorCall,
    OpenTensorCalls,
    choose_operands,
)
from rankdump._frameworks.torch.internals import has_only_reference
from rankdump._frameworks.torch.model_hook import attach_model
from rankdump._frameworks.torch.tensors import TorchObserver

GROUP = "Default/group-0/"


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{tmp_path}/store",
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=30),
    )
    group = dist.group.WORLD
    assert group is not None
    yield group
    end_group()


@pytest.fixture
def hook(alone: dist.ProcessGroup, recorder: Any) -> Iterator[IterationHook]:
    recorder.lists_operators = True
    recorder.wanted = lambda name, side: name.startswith(GROUP)
    hook = attach_model(nn.Linear(1, 1), recorder, 0)
    hook.iteration_begins(0, armed=True)
    yield hook
    hook.detach()


def read(recorder: Any, name: str) -> list[tuple[str, int, list[float]]]:
    """Return side, slot and elements of each tensor of a call."""
    return [
        (
            each.side.value,
            each.slot,
            torch.frombuffer(bytearray(each.data), dtype=torch.float32).tolist(),
        )
        for each in recorder.taken
        if each.op_name == GROUP + name
    ]


def test_input_is_read_before_a_call_in_place(hook, recorder) -> None:
    """The output is read when the call has returned, not when the script changes it."""
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    tensor.fill_(7)
    dist.broadcast(tensor, 0)
    assert read(recorder, "AllReduce-op0") == [("input", 0, [1, 1]), ("output", 0, [1, 1])]
    assert read(recorder, "Broadcast-op0") == [("input", 0, [7, 7]), ("output", 0, [7, 7])]
    assert {taken.op_type for taken in recorder.taken} == {"AllReduce", "Broadcast"}
    assert (GROUP + "AllReduce-op0", False) in recorder.settlements


def test_output_of_an_asynchronous_call_is_read_after_its_wait(hook, recorder) -> None:
    tensor = torch.ones(2)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    assert [side for side, *_ in read(recorder, "AllReduce-op0")] == ["input"]
    work.wait()
    tensor.zero_()
    assert read(recorder, "AllReduce-op0")[1:] == [("output", 0, [1, 1])]
    hook.iteration_ends(0, armed=True)
    assert recorder.lost == []


def test_output_that_nobody_waits_for_is_lost(hook, recorder) -> None:
    """A future that was waited for does not show when the output may be read."""
    tensor = torch.ones(2)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.get_future().wait()
    tensor.add_(1)
    assert recorder.lost == []
    hook.iteration_ends(0, armed=True)
    assert recorder.lost == [(GROUP + "AllReduce-op0", TensorSide.OUTPUT, "not_waited")]
    assert (GROUP + "AllReduce-op0", False) in recorder.settlements
    work.wait()
    assert len(read(recorder, "AllReduce-op0")) == 1


def test_lists_of_tensors_have_slots(hook, recorder) -> None:
    parts = [torch.zeros(3)]
    dist.all_gather(parts, torch.ones(3))
    dist.reduce_scatter(torch.zeros(2), [torch.full((2,), 4.0)])
    assert read(recorder, "AllGather-op0") == [
        ("input", 0, [1, 1, 1]),
        ("output", 0, [1, 1, 1]),
    ]
    assert read(recorder, "ReduceScatter-op0") == [("input", 0, [4, 4]), ("output", 0, [4, 4])]


def test_functional_call_is_read_where_its_tensor_is_waited_for(hook, recorder, alone) -> None:
    total = functional.all_reduce(torch.full((2,), 3.0), "sum", alone)
    before = read(recorder, "AllReduce-op0")
    assert before[:1] == [("input", 0, [3, 3])]
    (total * 1).sum()
    assert read(recorder, "AllReduce-op0") == [("input", 0, [3, 3]), ("output", 0, [3, 3])]
    several = functional.all_reduce_coalesced([torch.ones(1), torch.ones(2)], "sum", alone)
    _ = [each * 2 for each in several]
    found = read(recorder, "AllReduce-op1")
    assert [(side, slot) for side, slot, _ in found if side == "output"] == [
        ("output", 0),
        ("output", 1),
    ]
    hook.iteration_ends(0, armed=True)
    assert recorder.lost == []


def test_bucket_is_read_when_its_backward_is_over(alone, recorder) -> None:
    """The views of gradients are in the bucket: it has what the script gets."""
    recorder.lists_operators = True
    recorder.wanted = lambda name, side: "/bucket-" in name
    net = nn.Linear(3, 2)
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    hook = attach_model(model, recorder, 0)
    for iteration in range(3):
        hook.iteration_begins(iteration, armed=True)
        model.zero_grad()
        model(torch.ones(2, 3) * (iteration + 1)).square().sum().backward()
        grads = [each.grad.flatten() for each in net.parameters() if each.grad is not None]
        found = read(recorder, "bucket-0/AllReduce-op0")
        assert [side for side, *_ in found] == ["input", "output"] * (iteration + 1)
        assert sorted(found[-1][2]) == sorted(torch.cat(grads).tolist())
        for each in grads:
            each.zero_()
        hook.iteration_ends(iteration, armed=True)
    assert recorder.lost == []
    hook.detach()


def test_failed_call_ends_without_outputs(hook, recorder, alone) -> None:
    with pytest.raises(RuntimeError):
        alone.allreduce([torch.ones(1), torch.ones(1, dtype=torch.int64)])
    assert (GROUP + "AllReduce-op0", True) in recorder.settlements
    assert [each.side for each in recorder.taken] == [TensorSide.INPUT] * 2
    hook.iteration_ends(0, armed=True)
    assert recorder.lost == []


def test_nothing_is_asked_where_the_plan_lists_no_operators(hook, recorder) -> None:
    recorder.lists_operators = False
    asked = recorder.asked
    dist.all_reduce(torch.ones(2))
    assert (recorder.taken, recorder.asked) == ([], asked)
    assert recorder.names == [GROUP + "AllReduce-op0"]


def test_names_begin_with_each_iteration(hook, recorder) -> None:
    """Also after iterations that are not armed; an iteration that is armed again goes on."""
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    dist.all_reduce(torch.ones(1))
    recorder.armed = False
    hook.iteration_begins(1, armed=False)
    dist.all_reduce(torch.ones(1))
    hook.iteration_begins(2, armed=False)
    dist.all_reduce(torch.ones(1))
    recorder.armed = True
    hook.iteration_begins(2, armed=True)
    dist.all_reduce(torch.ones(1))
    names = [f"{GROUP}{each}" for each in ("AllReduce-op0", "Barrier-op0", "AllReduce-op1")]
    assert recorder.names == [*names, GROUP + "AllReduce-op1"]
    by_position = sorted(recorder.events, key=lambda event: event.position)
    first, *_, last = [event.collective.sequence for event in by_position]
    assert last - first == 5


def test_only_the_root_reads_or_gets_a_result() -> None:
    given, taken = [torch.ones(1)], [torch.ones(2)]
    for kind, is_root, sides in (
        (EventKind.BROADCAST, True, (given, taken)),
        (EventKind.BROADCAST, False, ((), taken)),
        (EventKind.SCATTER, False, ((), taken)),
        (EventKind.REDUCE, True, (given, taken)),
        (EventKind.REDUCE, False, (given, ())),
        (EventKind.GATHER, False, (given, ())),
        (EventKind.ALL_REDUCE, True, (given, taken)),
    ):
        operands = choose_operands(kind, given, taken, is_root=is_root)
        assert (operands.inputs, operands.outputs) == sides, kind


def test_memory_that_is_overwritten_ends_an_earlier_call(recorder) -> None:
    """The first output was never waited for, and now another call writes there."""
    errors: list[Exception] = []
    open_calls, tensor = OpenTensorCalls(errors.append), torch.ones(2)
    observer = TorchObserver(recorder, 0)
    first, second = (CollectiveTensorCall([(observer, name)], [tensor]) for name in ("a", "b"))
    for call in (first, second):
        open_calls.add(call)
        open_calls.add_memory(call)
    assert recorder.lost == [("a", TensorSide.OUTPUT, "not_waited")]
    open_calls.end_tensor_wait(tensor.view(2, 1))
    assert [taken.op_name for taken in recorder.taken] == ["b"]
    assert not errors


def test_tensor_that_something_else_refers_to_is_not_alone() -> None:
    assert has_only_reference([torch.ones(2)])
    held = torch.ones(2)
    assert not has_only_reference([held])
    views = [torch.ones(2)]
    view = views[0][:1]
    assert not has_only_reference(views)
    del view
    assert has_only_reference(views)
