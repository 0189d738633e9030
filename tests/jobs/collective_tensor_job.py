"""Ranks of one job whose collectives' tensors are dumped.

collective_tensor_job.py WORLD FOLDER: forks WORLD gloo ranks, which train without a session, and
then with one for each of SELECTIONS, into FOLDER/TREE. Rank N writes FOLDER/TREE.rank_N.json: the
losses of both runs, and digests of what it gave to and got from each collective, of values that it
computed itself.
"""

from __future__ import annotations

import hashlib
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from rank_processes import fork_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import rankdump
from rankdump._config.operator_patterns import parse_operator_patterns
from rankdump._core.plan import DumpPlan, OperatorSelection, OutputSettings, TensorSelection
from rankdump._core.rank_identity import RankIdentity

STEPS = 3
WIDTH = 6


class Job:
    """One run of the job on this rank."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.step = 0
        self.kept = torch.zeros(0)
        self.digests: list[list[object]] = []
        self.losses: list[str] = []

    def values(self, rank: int, count: int = 4) -> Tensor:
        """Return values that differ between steps and ranks."""
        generator = torch.Generator().manual_seed(100 * self.step + rank)
        return torch.randn(count, generator=generator)

    def add(self, name: str, side: str, slot: int, values: Tensor) -> None:
        data = values.detach().clone(memory_format=torch.contiguous_format).numpy().tobytes()
        digest = hashlib.sha256(data).hexdigest()
        self.digests.append([self.step, name, side, slot, digest])


def every_value(job: Job, count: int = 4) -> list[Tensor]:
    return [job.values(rank, count) for rank in range(job.world)]


def in_place(job: Job) -> Tensor:
    """An all-reduce that the script waits for in the call, and one that it waits for later."""
    own, total = job.values(job.rank), torch.stack(every_value(job)).sum(0)
    tensor = own.clone()
    dist.all_reduce(tensor)
    job.add("AllReduce-op0", "input", 0, own)
    job.add("AllReduce-op0", "output", 0, total)
    tensor.mul_(3)
    later = own.clone()
    work = dist.all_reduce(later, async_op=True)
    assert work is not None
    work.wait()
    job.add("AllReduce-op1", "input", 0, own)
    job.add("AllReduce-op1", "output", 0, total)
    later.zero_()
    return tensor.sum()


def gathered(job: Job) -> Tensor:
    parts = [torch.zeros(4) for _ in range(job.world)]
    dist.all_gather(parts, job.values(job.rank))
    job.add("AllGather-op0", "input", 0, job.values(job.rank))
    for slot, each in enumerate(every_value(job)):
        job.add("AllGather-op0", "output", slot, each)
    return torch.stack(parts).sum()


def scattered(job: Job) -> Tensor:
    whole = torch.stack([row * 2 for row in every_value(job)]) + job.rank
    part = torch.zeros(4)
    dist.reduce_scatter(part, list(whole.unbind()))
    for slot, each in enumerate(whole):
        job.add("ReduceScatter-op0", "input", slot, each)
    wholes = [torch.stack([row * 2 for row in every_value(job)]) + r for r in range(job.world)]
    job.add("ReduceScatter-op0", "output", 0, torch.stack(wholes).sum(0)[job.rank])
    return part.sum()


def broadcast(job: Job) -> Tensor:
    """Only the root has an input; only it has the output of a reduction."""
    tensor = job.values(job.rank)
    dist.broadcast(tensor, 1)
    if job.rank == 1:
        job.add("Broadcast-op0", "input", 0, job.values(1))
    job.add("Broadcast-op0", "output", 0, job.values(1))
    reduced = job.values(job.rank)
    dist.reduce(reduced, 0)
    job.add("Reduce-op0", "input", 0, job.values(job.rank))
    if job.rank == 0:
        job.add("Reduce-op0", "output", 0, torch.stack(every_value(job)).sum(0))
    return tensor.sum()


def functional_calls(job: Job) -> Tensor:
    group = dist.group.WORLD
    assert group is not None
    total = functional.all_reduce(job.values(job.rank), "sum", group) * 1
    job.add("AllReduce-op2", "input", 0, job.values(job.rank))
    job.add("AllReduce-op2", "output", 0, torch.stack(every_value(job)).sum(0))
    return total.sum()


def redistribute(job: Job, mesh: Any) -> Tensor:
    """A sharded tensor is gathered, a partial one reduced."""
    own = job.values(job.rank).view(1, 4)
    whole = DTensor.from_local(own, mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).to_local()
    job.add("AllGather-op1", "input", 0, own)
    job.add("AllGather-op1", "output", 0, torch.stack(every_value(job)))
    summed = DTensor.from_local(own, mesh, [Partial()]).redistribute(mesh, [Replicate()])
    job.add("AllReduce-op3", "input", 0, own)
    job.add("AllReduce-op3", "output", 0, torch.stack(every_value(job)).sum(0).view(1, 4))
    return whole.sum() + summed.to_local().sum()


def messages(job: Job) -> Tensor:
    """A blocking and an asynchronous message to the next rank, the last to the first."""
    there, back = (job.rank + 1) % job.world, (job.rank - 1) % job.world
    received = [torch.zeros(4), torch.zeros(4)]
    if job.rank:
        dist.recv(received[0], back)
        dist.send(job.values(job.rank), there)
    else:
        dist.send(job.values(job.rank), there)
        dist.recv(received[0], back)
    works = [dist.irecv(received[1], back), dist.isend(job.values(job.rank) * 2, there)]
    for work in works:
        assert work is not None
        work.wait()
    for number, factor in enumerate((1, 2)):
        job.add(f"peer-{there}/Send-op{number}", "input", 0, job.values(job.rank) * factor)
        job.add(f"peer-{back}/Recv-op{number}", "output", 0, job.values(back) * factor)
    return torch.stack(received).sum()


def by_future(job: Job) -> Tensor:
    """The script waits for the future, where nobody knows when the output may be read."""
    tensor = job.values(job.rank)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.get_future().wait()
    job.kept = tensor
    return tensor.sum()


def run(job: Job, session: rankdump.Session | None) -> None:
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (job.world,))
    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    net = nn.Sequential(*layers)
    model = DistributedDataParallel(net)
    if session is not None:
        session.attach(model)
    rows = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(job.rank))
    for job.step in range(STEPS):
        if session is not None:
            session.step(job.step)
        parts = [each(job) for each in (in_place, gathered, scattered, broadcast, functional_calls)]
        parts.append(redistribute(job, mesh))
        model.zero_grad()
        loss = model(rows).square().mean()
        loss.backward()
        # The order of the gradients in a bucket is the reducer's own.
        found = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
        job.add("bucket-0/AllReduce-op4", "sorted output", 0, found.sort().values)
        parts.append(by_future(job))
        with torch.no_grad():
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
        whole = torch.stack([loss.detach(), *parts, *(p.detach().sum() for p in net.parameters())])
        job.losses += [float(each).hex() for each in whole]


SELECTIONS: dict[str, list[str]] = {
    "selected": ["AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce", "Send", "Recv"],
    "named": ["Default/group-0/AllReduce-op1", "name-regex(.*/bucket-0/.*)"],
    "everything": [],
}
"""Lists of operators, by the tree that gets what they select."""


def dump(job: Job, tree: Path, kernels: list[str]) -> None:
    operators = parse_operator_patterns(kernels, lambda item, text: None)
    selection = TensorSelection(operators=operators if kernels else OperatorSelection())
    plan = DumpPlan(OutputSettings(str(tree)), selection=selection)
    identity = RankIdentity(job.rank, job.world, job_id=tree.name)
    with rankdump.Session(plan, identity=identity) as session:
        run(job, session)


def run_rank(folder: Path, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    plain = Job(rank, world)
    run(plain, None)
    for tree, kernels in SELECTIONS.items():
        job = Job(rank, world)
        dump(job, folder / tree, kernels)
        result = {"plain": plain.losses, "dumped": job.losses, "digests": job.digests}
        (folder / f"{tree}.rank_{rank}.json").write_text(json.dumps(result))
    dist.barrier()


def main() -> None:
    world, folder = int(sys.argv[1]), Path(sys.argv[2])
    sys.exit(fork_ranks(world, lambda rank: run_rank(folder, rank, world)))


if __name__ == "__main__":
    main()
