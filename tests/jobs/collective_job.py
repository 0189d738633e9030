"""Ranks of one job that communicate in many ways, once without a dump and once with one.

collective_job.py WORLD FOLDER SCENARIO...: forks WORLD gloo ranks, which run the scenarios one
after the other. Of a scenario rank N writes FOLDER/SCENARIO/rank_N.json: the losses of both runs,
and the operators of torch's collectives in each iteration of the first run, as torch's own profiler
counts them. The tree of the second run is FOLDER/SCENARIO/tree.
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from rank_processes import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import rankdump
from rankdump._core.plan import DumpPlan, OutputSettings
from rankdump._core.rank_identity import RankIdentity

STEPS = 3
WIDTH, ROWS = 8, 4

Step = Callable[[int], Tensor]
Scenario = Callable[[int, int], tuple[nn.Module, Step]]
"""Takes rank and world size; returns the model to attach, and a step that returns the loss."""

SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def mesh_of(*names: str) -> Any:
    shape = (dist.get_world_size(),) if len(names) == 1 else (2, 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def make_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, WIDTH))


def make_rows(seed: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, rows: Tensor) -> Tensor:
    """Train one step with plain gradient descent."""
    model.zero_grad()
    loss = model(rows).square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    return loss.detach()


class Averaging(nn.Module):
    """Communicates by functional collectives, with and without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        group = dist.group.WORLD
        assert group is not None
        rows = functional.all_gather_tensor_autograd(self.inner(x), 0, group)
        part = functional.reduce_scatter_tensor_autograd(rows, "sum", 0, group)
        with torch.no_grad():
            factor = functional.all_reduce(torch.ones(3), "sum", group)[0]
            first = functional.broadcast(torch.ones(5), 0, group)[0]
            several = functional.all_reduce_coalesced([torch.ones(2), torch.ones(4)], "sum", group)
        mixed = functional.all_to_all_single_autograd(part, None, None, group)
        return mixed * factor / (first + several[0][0])


@scenario
def functional_calls(rank: int, world: int) -> tuple[nn.Module, Step]:
    model = Averaging()
    return model, lambda step: train(model, make_rows(step + 10 * rank))


class Compiled(nn.Module):
    """Has its collective inside a compiled region."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.region = torch.compile(self.average, backend="aot_eager", fullgraph=True)

    @staticmethod
    def average(x: Tensor) -> Tensor:
        group = dist.group.WORLD
        assert group is not None
        return functional.all_reduce(x * 2, "sum", group) / 2

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.region(x)
        return self.inner(x) * scale


@scenario
def compiled(rank: int, world: int) -> tuple[nn.Module, Step]:
    model = Compiled()
    return model, lambda step: train(model, make_rows(step + 10 * rank))


@scenario
def ddp(rank: int, world: int) -> tuple[nn.Module, Step]:
    net = nn.Sequential(nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.Linear(64, WIDTH))
    model = DistributedDataParallel(net, bucket_cap_mb=0.002, find_unused_parameters=True)
    return model, lambda step: train(model, make_rows(step + 10 * rank))


def wrap_flat(*, use_orig_params: bool) -> FullyShardedDataParallel:
    device = torch.device("cpu")
    net = make_net()
    net[0] = FullyShardedDataParallel(net[0], device_id=device, use_orig_params=use_orig_params)
    return FullyShardedDataParallel(net, device_id=device, use_orig_params=use_orig_params)


@scenario
def fsdp1_flat(rank: int, world: int) -> tuple[nn.Module, Step]:
    model = wrap_flat(use_orig_params=False)
    return model, lambda step: train(model, make_rows(step + 10 * rank))


@scenario
def fsdp1_orig(rank: int, world: int) -> tuple[nn.Module, Step]:
    model = wrap_flat(use_orig_params=True)
    return model, lambda step: train(model, make_rows(step + 10 * rank))


def shard(net: nn.Sequential, mesh: Any, **options: Any) -> Any:
    for part in (net[0], net[2]):
        fully_shard(part, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


@scenario
def fsdp2(rank: int, world: int) -> tuple[nn.Module, Step]:
    model = shard(make_net(), mesh_of("dp"))
    return model, lambda step: train(model, make_rows(step + 10 * rank))


@scenario
def fsdp2_bf16(rank: int, world: int) -> tuple[nn.Module, Step]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(make_net(), mesh_of("dp"), mp_policy=policy)
    return model, lambda step: train(model, make_rows(step + 10 * rank))


@scenario
def fsdp2_accumulation(rank: int, world: int) -> tuple[nn.Module, Step]:
    """Two passes a step; gradients are reduced after the second one."""
    model = shard(make_net(), mesh_of("dp"))

    def step(number: int) -> Tensor:
        model.set_requires_gradient_sync(False)
        model(make_rows(100 + number)).square().mean().backward()
        model.set_requires_gradient_sync(True)
        loss = model(make_rows(number + 10 * rank)).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        model.zero_grad()
        return loss.detach()

    return model, step


class Checkpointed(nn.Module):
    """Computes its inner part again in the backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Any = checkpoint(self.inner, x, use_reentrant=False)
        return result


@scenario
def fsdp2_checkpointing(rank: int, world: int) -> tuple[nn.Module, Step]:
    mesh = mesh_of("dp")
    inner: Any = fully_shard(make_net(), mesh=mesh)
    model: Any = fully_shard(Checkpointed(inner), mesh=mesh)
    return model, lambda step: train(model, make_rows(step + 10 * rank))


@scenario
def hsdp(rank: int, world: int) -> tuple[nn.Module, Step]:
    model = shard(make_net(), mesh_of("replicate", "shard"))
    return model, lambda step: train(model, make_rows(step + 10 * rank))


def parallelize(net: nn.Module, mesh: Any, *, sequence: bool = False) -> nn.Module:
    plan: dict[str, Any] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    if sequence:
        plan = {
            "0": ColwiseParallel(input_layouts=Shard(0)),
            "2": RowwiseParallel(output_layouts=Shard(0)),
        }
    return parallelize_module(net, mesh, plan)


@scenario
def tp(rank: int, world: int) -> tuple[nn.Module, Step]:
    model = parallelize(make_net(), mesh_of("tp"))
    return model, lambda step: train(model, make_rows(step))


@scenario
def tp_sp(rank: int, world: int) -> tuple[nn.Module, Step]:
    mesh = mesh_of("tp")
    norm = parallelize_module(nn.LayerNorm(WIDTH), mesh, SequenceParallel(sequence_dim=0))
    net = parallelize(make_net(), mesh, sequence=True)
    model = nn.Sequential(norm, net)
    return model, lambda step: train(model, make_rows(step)[rank * 2 : rank * 2 + 2])


@scenario
def fsdp2_tp(rank: int, world: int) -> tuple[nn.Module, Step]:
    mesh = mesh_of("dp", "tp")
    net = parallelize(make_net(), mesh["tp"])
    model: Any = fully_shard(net, mesh=mesh["dp"])
    return model, lambda step: train(model, make_rows(step + 10 * (rank // 2)))


class Moving(nn.Module):
    """Its activations change their placements."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.mesh = mesh
        self.weight = nn.Parameter(distribute_tensor(torch.eye(WIDTH) / 3, mesh, [Replicate()]))

    def forward(self, x: Tensor) -> Tensor:
        rows: Any = distribute_tensor(x, self.mesh, [Shard(0)]) @ self.weight
        rows = rows.redistribute(self.mesh, [Shard(1)])
        return rows.sum(dim=1).redistribute(self.mesh, [Replicate()]).to_local()


@scenario
def redistribute(rank: int, world: int) -> tuple[nn.Module, Step]:
    model = Moving(mesh_of("dp"))
    return model, lambda step: train(model, make_rows(step))


def make_pipeline(rank: int, world: int, kind: Any, chunks: int = 1) -> tuple[nn.Module, Step]:
    """Give each rank as many stages of the model as there are chunks."""
    parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(chunks)]
    part = nn.Sequential(*parts)
    stages = [
        PipelineStage(chunk, rank + number * world, chunks * world, torch.device("cpu"))
        for number, chunk in enumerate(parts)
    ]
    own = stages if chunks > 1 else stages[0]
    schedule = kind(own, n_microbatches=4, loss_fn=nn.functional.mse_loss)

    def step(number: int) -> Tensor:
        part.zero_grad()
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(make_rows(number))
        elif rank == world - 1:
            schedule.step(target=torch.ones(ROWS, WIDTH), losses=losses)
        else:
            schedule.step()
        with torch.no_grad():
            for parameter in part.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
        total = [parameter.detach().sum() for parameter in part.parameters()]
        return torch.stack([*total, *(each.detach() for each in losses)]).sum()

    return part, step


@scenario
def pp_gpipe(rank: int, world: int) -> tuple[nn.Module, Step]:
    return make_pipeline(rank, world, ScheduleGPipe)


@scenario
def pp_1f1b(rank: int, world: int) -> tuple[nn.Module, Step]:
    return make_pipeline(rank, world, Schedule1F1B)


@scenario
def pp_interleaved(rank: int, world: int) -> tuple[nn.Module, Step]:
    return make_pipeline(rank, world, ScheduleInterleaved1F1B, chunks=2)


@scenario
def functional_messages(rank: int, world: int) -> tuple[nn.Module, Step]:
    """Messages that C++ starts, received before they are sent."""
    model = nn.Linear(WIDTH, WIDTH)
    group = dist.group.WORLD
    assert group is not None
    ops: Any = torch.ops._c10d_functional  # pyright: ignore[reportPrivateUsage]

    def step(number: int) -> Tensor:
        received = torch.empty(2)
        other = 1 - rank
        waiting = ops.irecv(received, other, 0, group.group_name)
        sent = ops.isend(torch.full((2,), float(rank + number)), other, 0, group.group_name)
        loss = train(model, make_rows(number))
        for tensor in (waiting, sent):
            ops.wait_tensor(tensor)
        assert received.tolist() == [float(other + number)] * 2
        return loss

    return model, step


@scenario
def backend_calls(rank: int, world: int) -> tuple[nn.Module, Step]:
    """The second step calls the backend itself, twice."""
    model = DistributedDataParallel(make_net())
    group = dist.group.WORLD
    assert group is not None
    backend: Any = group._get_backend(torch.device("cpu"))

    def step(number: int) -> Tensor:
        for _ in range(2 if number == 1 else 0):
            backend.allreduce([torch.ones(2)]).wait()
        return train(model, make_rows(number))

    return model, step


def read_loss(loss: Tensor) -> str:
    whole = loss.full_tensor() if isinstance(loss, DTensor) else loss
    return float(whole).hex()


def run_plain(name: str, rank: int, world: int) -> tuple[list[str], list[dict[str, int]]]:
    """Return the losses, and the operators of each iteration that the profiler counted."""
    _, step = SCENARIOS[name](rank, world)
    losses: list[str] = []
    counts: list[dict[str, int]] = []
    for number in range(STEPS):
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            loss = step(number)
        losses.append(read_loss(loss))
        names = (event.name for event in profiled.events() or ())
        counts.append(dict(Counter(each for each in names if each.startswith("c10d::"))))
    return losses, counts


def run_dumped(name: str, rank: int, world: int, tree: Path) -> list[str]:
    model, step = SCENARIOS[name](rank, world)
    plan = DumpPlan(OutputSettings(str(tree)))
    session = rankdump.Session(plan, identity=RankIdentity(rank, world, job_id=name))
    session.attach(model)
    losses: list[Tensor] = []
    for number in range(STEPS):
        session.step(number)
        losses.append(step(number))
    session.close()
    return [read_loss(loss) for loss in losses]


def run_scenario(name: str, rank: int, world: int, own: Path) -> None:
    """Run a scenario without and with a dump on one rank, and write what it computed."""
    torch.manual_seed(3)
    plain, counts = run_plain(name, rank, world)
    gc.collect()
    torch.manual_seed(3)
    dumped = run_dumped(name, rank, world, own / "tree")
    result = {"plain": plain, "dumped": dumped, "counts": counts}
    (own / f"rank_{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    run_ranks(run_scenario)
