"""Search for collectives that are not seen: groups written in Python, and calls of a backend."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.process_groups import end_group
from torch.nn.parallel import DistributedDataParallel

from rankdump._core.events import UnseenReason
from rankdump._frameworks.torch.communication import (
    BucketCounter,
    UnseenCollectiveCounter,
    find_backward,
    is_captured,
    is_python_group,
)
from rankdump._frameworks.torch.model_hook import attach_model


class OwnGroup(dist.ProcessGroup):
    """Replaces a collective in Python."""

    allreduce: Any = None


class RenamedGroup(dist.ProcessGroup):
    """Replaces no collective."""


def make_group(kind: Any) -> dist.ProcessGroup:
    """Return a group of one rank; torch's stubs do not have this constructor."""
    return kind(0, 1)


@pytest.fixture
def alone(tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    end_group()


def test_group_of_python_is_recognised(alone) -> None:
    assert is_python_group(make_group(OwnGroup))
    assert not is_python_group(make_group(RenamedGroup))
    assert not is_python_group(alone)


def test_calls_between_two_looks_are_counted(alone) -> None:
    """What came before the first look, or was skipped as seen, is not counted."""
    backend = alone._get_backend(torch.device("cpu"))

    def call() -> None:
        backend.allreduce([torch.ones(1)]).wait()

    call()
    counter = UnseenCollectiveCounter()
    counter.restart()
    assert counter.take() == {}
    call()
    counter.skip(alone)
    assert counter.take() == {}
    call()
    call()
    counter.compare(alone)
    call()
    assert counter.take() == {("0", UnseenReason.BACKEND_CALL): 3}
    assert counter.take() == {}


def test_tensor_of_the_host_is_never_captured() -> None:
    assert not is_captured(torch.device("cpu"))
    assert not is_captured(None)


def test_only_the_engine_itself_reduces_buckets() -> None:
    """An all-reduce that Python calls inside a backward is not one of a reducer's."""
    found: list[object] = []
    counter = BucketCounter()

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        here = sys._getframe()
        found.append((find_backward(here), counter.make_scope("0", here, "float32")))
        engine = here.f_back
        while engine is not None and find_backward(engine) is None:
            engine = engine.f_back
        found.extend(counter.make_scope("0", engine, "float32") for _ in range(2))
        found.append(counter.make_scope("1", engine, "float16"))
        found.append(counter.make_scope("0", engine, "int32"))
        return gradient

    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(hook)
    weight.sum().backward()
    weight.sum().backward()
    one = [(None, ""), "bucket-0/", "bucket-1/", "bucket-0/", "used-parameters/"]
    assert found == one * 2
    assert counter.make_scope("0", None, "float32") == ""


def test_failing_recorder_does_not_fail_the_collective(alone, recorder, monkeypatch) -> None:
    """The call is reported as not seen, and torch is restored at the end."""

    def fail(**about: object) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(recorder, "start_event", fail)
    hook = attach_model(torch.nn.Linear(1, 1), recorder, 0)
    hook.iteration_begins(0, armed=True)
    assert has_kernel()
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [1.0, 1.0]
    hook.iteration_ends(0, armed=True)
    assert recorder.unseen == [("", UnseenReason.UNREADABLE_CALL, 1)]
    assert recorder.warnings == ["a collective could not be recorded: ValueError: broken"]
    hook.detach()
    assert not has_kernel()


def test_compiler_does_not_compile_the_observation_of_collectives(alone, recorder) -> None:
    """Collectives that C++ starts while a compiled model runs are seen as without the compiler."""
    torch.compiler.reset()
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
    compiled: Any = torch.compile(model, backend="aot_eager")
    hook = attach_model(compiled, recorder, 0)
    for iteration in range(2):
        hook.iteration_begins(iteration, armed=True)
        compiled(torch.ones(2, 2)).sum().backward()
        hook.iteration_ends(iteration, armed=True)
    hook.detach()
    assert recorder.unseen == []
    assert not [text for text in recorder.warnings if "could not be recorded" in text]
    recorder.wait_for_ends()
    kinds = [each.collective.kind.name for each in recorder.events if each.collective]
    assert kinds.count("ALL_REDUCE") == 2


def has_kernel() -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "BackendSelect")
