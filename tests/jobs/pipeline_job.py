"""Jobs of pipeline schedules, of two models, and of compiled models, without a dump and with one.

Run as a program by the tests beside it: world size, folder, and names of scenarios. Each rank
writes its losses and, for schedules, digests of what a model that runs in one piece computes for
each micro-batch.
"""

# torch types what stands in a module as `Tensor | Module`.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportUnknownMemberType=false, reportPrivateUsage=false

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_processes import run_ranks
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.nn.parallel import DistributedDataParallel

import rankdump
from rankdump._core.plan import DumpPlan, OutputSettings
from rankdump._core.rank_identity import RankIdentity

WIDTH, ROWS, MICROBATCHES, ITERATIONS, BLOCKS = 4, 8, 4, 2, 4


class Job:
    """One run of a scenario on one rank."""

    def __init__(self, rank: int, world: int, session: rankdump.Session | None = None) -> None:
        self.rank = rank
        self.world = world
        self.session = session or rankdump.Session()
        self.losses: list[str] = []
        self.digests: dict[str, Any] = {}
        """By iteration and module: side, and the digests of the micro-batches in order."""

    def add_loss(self, loss: Tensor) -> None:
        """Keep every bit of a loss."""
        self.losses.append(float(loss.detach()).hex())


class Block(nn.Module):
    """Layers of a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x)) + x


class Part(nn.Module):
    """Consecutive blocks, named by their place in the whole model."""

    def __init__(self, blocks: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, block in blocks.items():
            self.add_module(name, block)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.children():
            x = block(x)
        return x


def make_model() -> Part:
    """Return the whole model; equal on all ranks."""
    return Part({f"block{index}": Block() for index in range(BLOCKS)})


def cut(model: Part, count: int) -> list[Part]:
    """Return copies of equal consecutive parts."""
    size = BLOCKS // count
    named = list(deepcopy(model).named_children())
    return [Part(dict(named[size * at : size * (at + 1)])) for at in range(count)]


def compute_digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


class ReferenceRun:
    """Digests of what each module reads and writes when the whole model runs in one piece."""

    def __init__(self, model: Part) -> None:
        self.model = model
        self.found: dict[str, dict[str, list[str]]] = {}

    def run(self, batch: Tensor, target: Tensor, loss_of: Callable[..., Tensor]) -> None:
        """Run every micro-batch forward and backward."""
        handles = [
            module.register_forward_hook(self._make_hook(name))
            for name, module in self.model.named_modules()
            if name
        ]
        chunks = zip(batch.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True)
        for rows, wanted in chunks:
            loss_of(self.model(rows), wanted).backward()
        for handle in handles:
            handle.remove()
        self.model.zero_grad()

    def _make_hook(self, name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            sides = self.found.setdefault(name, {})
            for side, tensor in (("input", args[0]), ("output", output)):
                sides.setdefault(side, []).append(compute_digest(tensor))
                gradients = sides.setdefault(f"gradient of {side}", [])
                if tensor.requires_grad:
                    tensor.register_hook(lambda g, to=gradients: to.append(compute_digest(g)))

        return hook


def run_schedule(job: Job, kind: Any, count: int, loss_of: Callable[..., Tensor]) -> None:
    """Train `count` stages in all; stage s is on rank s modulo the world size."""
    model = make_model()
    parts = cut(model, count)
    indices = range(job.rank, count, job.world)
    stages = [PipelineStage(parts[i], i, count, torch.device("cpu")) for i in indices]
    for index in indices:
        job.session.attach(parts[index], f"stage{index}")
    schedule = kind(stages if count > job.world else stages[0], MICROBATCHES, loss_fn=loss_of)
    own = [parameter for index in indices for parameter in parts[index].parameters()]
    optimizer = torch.optim.SGD(own, lr=0.1)
    for iteration in range(ITERATIONS):
        batch, target = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
        reference = ReferenceRun(model)
        reference.run(batch, target, loss_of)
        job.digests[str(iteration)] = reference.found
        job.session.step(iteration)
        losses: list[Tensor] = []
        given = (batch,) if job.rank == 0 else ()
        wanted = {"target": target, "losses": losses} if stages[-1].is_last else {}
        schedule.step(*given, **wanted)
        optimizer.step()
        optimizer.zero_grad()
        for loss in losses:
            job.add_loss(loss)
        share_weights(model, [parts[index] for index in indices])
    job.session.close()


def share_weights(model: Part, own: list[Part]) -> None:
    """Give the whole model the weights of every rank's stages."""
    state = {name: value for part in own for name, value in part.state_dict().items()}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, state)
    model.load_state_dict({name: value for each in gathered for name, value in each.items()})


def gpipe(job: Job) -> None:
    run_schedule(job, ScheduleGPipe, job.world, nn.functional.mse_loss)


def one_forward_one_backward(job: Job) -> None:
    run_schedule(job, Schedule1F1B, job.world, nn.functional.mse_loss)


def interleaved(job: Job) -> None:
    run_schedule(job, ScheduleInterleaved1F1B, 2 * job.world, nn.functional.mse_loss)


def gan(job: Job) -> None:
    """Train two models in turns, as DCGAN does, and evaluate in between."""
    generator = nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh())
    discriminator = nn.Sequential(nn.Linear(WIDTH, 1))
    job.session.attach(generator, "generator")
    job.session.attach(discriminator, "discriminator")
    steps = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, discriminator)]
    judge = nn.functional.binary_cross_entropy_with_logits
    for iteration in range(ITERATIONS):
        job.session.step(iteration)
        real, noise = torch.randn(ROWS, WIDTH), torch.randn(ROWS, 2)
        for step in steps:
            step.zero_grad()
        loss_real = judge(discriminator(real), torch.ones(ROWS, 1))
        loss_real.backward()
        fake = generator(noise)
        loss_fake = judge(discriminator(fake.detach()), torch.zeros(ROWS, 1))
        loss_fake.backward()
        steps[1].step()
        loss = judge(discriminator(fake), torch.ones(ROWS, 1))
        loss.backward()
        steps[0].step()
        generator.eval()
        with torch.no_grad():
            sample = generator(noise)
        generator.train()
        for value in (loss_real, loss_fake, loss, sample.sum()):
            job.add_loss(value)
    job.session.close()


def accumulation(job: Job) -> None:
    """Accumulate gradients of four micro-batches; only the last one is reduced."""
    model = DistributedDataParallel(make_model())
    job.session.attach(model, "net")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for iteration in range(ITERATIONS):
        job.session.step(iteration)
        chunks = torch.randn(ROWS, WIDTH).chunk(MICROBATCHES)
        with model.no_sync():
            for rows in chunks[:-1]:
                loss = model(rows).square().mean()
                loss.backward()
                job.add_loss(loss)
        loss = model(chunks[-1]).square().mean()
        loss.backward()
        job.add_loss(loss)
        optimizer.step()
        optimizer.zero_grad()
    job.session.close()


def train_compiled(job: Job, model: Any) -> None:
    """Train in micro-batches that the script declares, and evaluate."""
    job.session.attach(model, "net")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for iteration in range(ITERATIONS):
        job.session.step(iteration)
        for index, rows in enumerate(torch.randn(ROWS, WIDTH).chunk(MICROBATCHES)):
            job.session.microbatch(index)
            loss = model(rows).square().mean()
            loss.backward()
            job.add_loss(loss)
        optimizer.step()
        optimizer.zero_grad()
    job.session.close()


def compiled_whole(job: Job) -> None:
    train_compiled(job, torch.compile(make_model(), backend="aot_eager"))


def compiled_blocks(job: Job) -> None:
    model = make_model()
    for block in model.children():
        block.compile(backend="aot_eager")
    train_compiled(job, model)


SCENARIOS: dict[str, Callable[[Job], None]] = {
    function.__name__: function
    for function in (
        gpipe,
        one_forward_one_backward,
        interleaved,
        gan,
        accumulation,
        compiled_whole,
        compiled_blocks,
    )
}


def run_scenario(name: str, rank: int, world: int, own: Path) -> None:
    """Run a scenario without and with a dump on one rank, and write what it computed."""
    torch.manual_seed(3)
    plain = Job(rank, world)
    SCENARIOS[name](plain)
    torch.compiler.reset()
    torch.manual_seed(3)
    plan = DumpPlan(OutputSettings(str(own / "tree")))
    session = rankdump.Session(plan, identity=RankIdentity(rank, world, job_id=name))
    dumped = Job(rank, world, session)
    SCENARIOS[name](dumped)
    found = {"plain": plain.losses, "dumped": dumped.losses, "digests": dumped.digests}
    (own / f"rank_{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    run_ranks(run_scenario)
