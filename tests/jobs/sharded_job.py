"""Ranks of one job that train with sharded parameters, once without a dump and once with one.

sharded_job.py WORLD FOLDER SCENARIO...: forks WORLD gloo ranks, which run the scenarios one after
the other. Of a scenario rank N writes FOLDER/SCENARIO/rank_N.json: losses of both runs, digests
that it computed itself of each of its parameters and gradients; rank 0 also writes full.npz, the
whole tensors of the last iteration, gathered after the dump has ended. The tree is
FOLDER/SCENARIO/tree.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rank_processes import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import rankdump
from rankdump._core.plan import ContentSettings, DumpPlan, OutputSettings, TensorSelection
from rankdump._core.rank_identity import RankIdentity

STEPS = 2
WIDTH, HIDDEN, ROWS = 6, 12, 4
CPU = torch.device("cpu")
STATES = ("exp_avg", "exp_avg_sq")
RECORDED = ContentSettings(saved="full", fingerprints=True)
WITH_ROWS = ("fsdp1_flat", "fsdp2")
"""Scenarios that run once more with statistics alone, into FOLDER/SCENARIO/rows."""
FOUND_STATES = ("ddp_unreduced",)
"""Scenarios whose plan asks for the states of optimizers."""


class Block(nn.Module):
    """A norm and two layers; 5 rows of a bias are not divisible by the ranks."""

    def __init__(self, hidden: int, *, repeats: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)
        self.repeats = repeats

    def forward(self, x: Tensor) -> Tensor:
        if self.repeats:
            return x + checkpoint(self.inner, x, use_reentrant=False)
        return x + self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks and a head."""

    def __init__(self, hidden: int = 5, *, repeats: bool = False) -> None:
        super().__init__()
        self.first = Block(hidden, repeats=repeats)
        self.second = Block(hidden, repeats=repeats)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)))


@dataclass
class Job:
    """One run of a scenario on this rank."""

    rank: int
    session: rankdump.Session | None = None
    losses: list[str] = field(default_factory=list)
    digests: list[list[object]] = field(default_factory=list)
    full: dict[str, np.ndarray] = field(default_factory=dict)
    iteration: int = 0
    finds_states: bool = False
    """Whether the plan asks for the states of optimizers, so that the script need not."""

    def attach(self, model: nn.Module) -> None:
        if self.session is not None:
            self.session.attach(model)

    def add(self, name: str, tensor: Tensor | None) -> None:
        """Digest the local elements of a tensor, as this program knows them."""
        if tensor is None:
            return
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.numel():
            data = _copy(local)
            digest = hashlib.sha256(data.tobytes()).hexdigest()
            self.digests.append([self.iteration, name, list(data.shape), digest])

    def train(
        self,
        model: nn.Module,
        named: Callable[[], Iterator[tuple[str, Tensor]]] | None = None,
        *,
        batch: Callable[[Tensor], Tensor] = lambda x: x,
        backward: Callable[[nn.Module, Tensor], Tensor] | None = None,
        whole_batch: bool = False,
        options: dict[str, Any] | None = None,
        states: bool = False,
        stages: bool = False,
        evaluates: bool = False,
    ) -> None:
        """Train for a few steps; the digests are those of parameters and gradients."""
        named = named or model.named_parameters
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **(options or {}))
        self.attach(model)
        if states and not self.finds_states and self.session is not None:
            self.session.optimizer(optimizer)
        if stages and self.session is not None:
            self.session.data_parallel(model)
        generator = torch.Generator().manual_seed(7 if whole_batch else self.rank)
        for step in range(STEPS):
            if self.session is not None:
                self.session.step(step)
            self.iteration = step
            optimizer.zero_grad()
            rows = batch(torch.randn(ROWS, WIDTH, generator=generator))
            if backward is None:
                loss = model(rows).square().mean()
                loss.backward()
            else:
                loss = backward(model, rows)
            for name, parameter in named():
                self.add(f"Gradients/{name}", parameter.grad)
            optimizer.step()
            for name, parameter in named():
                self.add(name, parameter)
                for key in STATES if states else ():
                    self.add(f"Optimizer/{name}.{key}", optimizer.state[parameter][key])
            self.losses.append(float(_read(loss)).hex())
            if evaluates and step < STEPS - 1:
                # FSDP2 leaves the root's parameters gathered: so the next iteration begins.
                with torch.no_grad():
                    model(rows)
        if self.session is not None:
            self.session.close()
        for name, parameter in named():
            self.full[name] = _gather(parameter)
            for key in STATES if states else ():
                state = optimizer.state[parameter][key]
                self.full[f"Optimizer/{name}.{key}"] = _gather(state)
            if parameter.grad is not None:
                self.full[f"Gradients/{name}"] = _gather(parameter.grad)


def _read(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _gather(tensor: Tensor) -> np.ndarray:
    return _copy(_read(tensor))


def _copy(tensor: Tensor) -> np.ndarray:
    # numpy would pin the storage, which FSDP resizes.
    return tensor.detach().clone(memory_format=torch.contiguous_format).numpy()


SCENARIOS: dict[str, Callable[[Job], None]] = {}


def scenario(function: Callable[[Job], None]) -> Callable[[Job], None]:
    SCENARIOS[function.__name__] = function
    return function


def line_mesh(name: str) -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))


def plane_mesh(*names: str) -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


@scenario
def ddp(job: Job) -> None:
    net = Net()
    job.train(DistributedDataParallel(net), net.named_parameters)


@scenario
def ddp_unreduced(job: Job) -> None:
    net = Net(repeats=True)
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    job.train(model, net.named_parameters, stages=True, states=True)


def accumulate(model: Any) -> Callable[[nn.Module, Tensor], Tensor]:
    """Return a backward in two parts, of which the second one reduces."""

    def backward(net: nn.Module, rows: Tensor) -> Tensor:
        with model.no_sync():
            net(rows).square().mean().backward()
        loss = net(rows * 2).square().mean()
        loss.backward()
        return loss

    return backward


@scenario
def ddp_accumulation(job: Job) -> None:
    net = Net()
    model = DistributedDataParallel(net)
    job.train(model, net.named_parameters, backward=accumulate(model), stages=True)


class Twice(nn.Module):
    """Each parameter is used in two segments, which one backward recomputes one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=True)
        return x


@scenario
def ddp_static_graph(job: Job) -> None:
    net = Twice()
    model = DistributedDataParallel(net, static_graph=True)
    job.train(model, net.named_parameters, stages=True)


def shard_fully(net: Any, mesh: Any, **options: Any) -> Any:
    for block in (net.first, net.second):
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def wrap_flat(net: Any, **options: Any) -> Any:
    for name in ("first", "second"):
        setattr(net, name, FullyShardedDataParallel(getattr(net, name), device_id=CPU, **options))
    return FullyShardedDataParallel(net, device_id=CPU, **options)


def list_clean(model: nn.Module) -> Callable[[], Iterator[tuple[str, Tensor]]]:
    def named() -> Iterator[tuple[str, Tensor]]:
        for name, parameter in model.named_parameters():
            yield name.replace("_fsdp_wrapped_module.", ""), parameter

    return named


def gather_flat(job: Job, model: nn.Module) -> None:
    with FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=True):
        for name, parameter in list_clean(model)():
            job.full[name] = _gather(parameter)
            assert parameter.grad is not None
            job.full[f"Gradients/{name}"] = _gather(parameter.grad)


def gather_flat_shards(job: Job, model: nn.Module) -> None:
    for module in FullyShardedDataParallel.fsdp_modules(model):
        handle: Any = module._handle
        flat = handle.flat_param
        name = next(name for name, each in list_clean(model)() if each is flat)
        for title, shard in ((name, flat.detach()), (f"Gradients/{name}", flat.grad)):
            whole = torch.empty(shard.numel() * dist.get_world_size())
            dist.all_gather_single(whole, shard)
            job.full[title] = whole[: flat._unpadded_unsharded_size.numel()].numpy()


@scenario
def fsdp1_flat(job: Job) -> None:
    model = wrap_flat(Net())
    job.train(model, list_clean(model))
    gather_flat_shards(job, model)


@scenario
def fsdp1_orig(job: Job) -> None:
    model = wrap_flat(Net(), use_orig_params=True)
    job.train(model, list_clean(model))
    gather_flat(job, model)


@scenario
def fsdp1_unreduced(job: Job) -> None:
    model = wrap_flat(Net(repeats=True))
    job.train(model, list_clean(model), stages=True)
    gather_flat_shards(job, model)


@scenario
def fsdp1_accumulation(job: Job) -> None:
    model = wrap_flat(Net(), use_orig_params=True)
    job.train(model, list_clean(model), backward=accumulate(model), stages=True)
    gather_flat(job, model)


@scenario
def fsdp1_mixed(job: Job) -> None:
    """Two forwards before one backward, each with parameters of its own in bfloat16."""
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = wrap_flat(Net(repeats=True), use_orig_params=True, mixed_precision=policy)

    def backward(net: nn.Module, rows: Tensor) -> Tensor:
        loss = sum(net(rows * scale).float().square().mean() for scale in (1, 2))
        assert isinstance(loss, Tensor)
        loss.backward()
        return loss

    job.train(model, list_clean(model), backward=backward, stages=True)
    gather_flat(job, model)


@scenario
def fsdp1_hybrid(job: Job) -> None:
    options: dict[str, Any] = {
        "device_mesh": plane_mesh("replicate", "shard"),
        "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
        "use_orig_params": True,
    }
    model = wrap_flat(Net(), **options)
    job.train(model, list_clean(model))
    gather_flat(job, model)


@scenario
def fsdp2(job: Job) -> None:
    job.train(shard_fully(Net(), line_mesh("dp")), states=True)


@scenario
def fsdp2_bf16(job: Job) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    job.train(shard_fully(Net(), line_mesh("dp"), mp_policy=policy), evaluates=True)


@scenario
def fsdp2_unsharded(job: Job) -> None:
    job.train(shard_fully(Net(repeats=True), line_mesh("dp")), stages=True)


@scenario
def fsdp2_accumulation(job: Job) -> None:
    model: Any = shard_fully(Net(), line_mesh("dp"))

    def backward(net: nn.Module, rows: Tensor) -> Tensor:
        model.set_requires_gradient_sync(False)
        net(rows).square().mean().backward()
        model.set_requires_gradient_sync(True)
        loss = net(rows * 2).square().mean()
        loss.backward()
        return loss

    job.train(model, backward=backward, stages=True)


@scenario
def fsdp2_checkpointing(job: Job) -> None:
    job.train(shard_fully(Net(repeats=True), line_mesh("dp")))


@scenario
def hsdp(job: Job) -> None:
    job.train(shard_fully(Net(), plane_mesh("replicate", "shard")))


def parallelize(net: Any, mesh: Any, *, sequence: bool = False) -> None:
    for block in (net.first, net.second):
        plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if sequence:
            plan = {
                "norm": SequenceParallel(sequence_dim=0),
                "up": ColwiseParallel(input_layouts=Shard(0)),
                "down": RowwiseParallel(output_layouts=Shard(0)),
            }
        parallelize_module(block, mesh, plan)
    if sequence:
        ready = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(0),), use_local_output=True
        )
        parallelize_module(net.first, mesh, ready)
        whole = ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate())
        parallelize_module(net, mesh, {"head": whole})


@scenario
def tp(job: Job) -> None:
    net = Net(HIDDEN)
    parallelize(net, line_mesh("tp"))
    job.train(net, whole_batch=True, options={"foreach": False})


@scenario
def tp_sp(job: Job) -> None:
    net = Net(HIDDEN)
    parallelize(net, line_mesh("tp"), sequence=True)
    job.train(net, whole_batch=True, options={"foreach": False})


@scenario
def fsdp2_tp(job: Job) -> None:
    mesh = plane_mesh("dp", "tp")
    net = Net(HIDDEN)
    parallelize(net, mesh["tp"])
    model = shard_fully(net, mesh["dp"])
    job.train(model, whole_batch=True, options={"foreach": False}, states=True)


class Moving(nn.Module):
    """Its tensors change their placements on the way."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.mesh = mesh
        for name, parameter in list(self.inner.named_parameters()):
            whole = distribute_tensor(parameter.detach(), mesh, [Replicate()])
            self.inner.register_parameter(name, nn.Parameter(whole))
        self.through = nn.ModuleList(nn.Identity() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        rows: Any = distribute_tensor(x, self.mesh, [Shard(0)])
        rows = self.inner(self.through[0](rows))
        rows = self.through[1](rows.redistribute(self.mesh, [Shard(1)]))
        total = self.through[2](rows.sum(dim=1))
        assert isinstance(total.placements[0], Partial)
        return total.redistribute(self.mesh, [Replicate()])


@scenario
def redistribute(job: Job) -> None:
    job.train(Moving(line_mesh("dp")), whole_batch=True, options={"foreach": False})


def run_scenario(name: str, rank: int, world: int, own: Path) -> None:
    """Run a scenario without and with a dump on one rank, and write what it computed."""
    torch.manual_seed(3)
    plain = Job(rank)
    SCENARIOS[name](plain)
    torch.manual_seed(3)
    finds_states = name in FOUND_STATES
    selection = TensorSelection(optimizer_states=finds_states)
    plan = DumpPlan(OutputSettings(str(own / "tree")), selection, RECORDED)
    session = rankdump.Session(plan, identity=RankIdentity(rank, world, job_id=name))
    dumped = Job(rank, session, finds_states=finds_states)
    SCENARIOS[name](dumped)
    if name in WITH_ROWS:
        content = replace(RECORDED, saved="statistic")
        plan = DumpPlan(OutputSettings(str(own / "rows")), selection, content)
        session = rankdump.Session(plan, identity=RankIdentity(rank, world, job_id=f"{name}-rows"))
        torch.manual_seed(3)
        SCENARIOS[name](Job(rank, session, finds_states=finds_states))
    result = {
        "plain": plain.losses,
        "dumped": dumped.losses,
        "digests": dumped.digests,
        "same": plain.digests == dumped.digests,
    }
    (own / f"rank_{rank}.json").write_text(json.dumps(result))
    if rank == 0:
        np.savez(own / "full.npz", allow_pickle=False, **dumped.full)


if __name__ == "__main__":
    run_ranks(run_scenario)
