"""Ranks that train one small transformer in a layout, for comparisons of layouts.

layout_job.py WORLD FOLDER NAME...: forks WORLD gloo ranks, which run one scenario after the other.
A name is a layout, or a layout and a defect: `ddp-seed`. Weights and global batch are the same in
all layouts. The dump is FOLDER/NAME/tree.
"""

# torch types what stands in a module as `Tensor | Module`, and plans of styles as of one style.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportReturnType=false
# pyright: reportUnnecessaryComparison=false, reportIndexIssue=false, reportCallIssue=false

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from rank_processes import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import rankdump
from rankdump._core.plan import ContentSettings, DumpPlan, OutputSettings, TensorSelection
from rankdump._core.rank_identity import RankIdentity

STEPS = 2
WIDTH, HEADS, HIDDEN, TOKENS, BATCH, CLASSES = 16, 4, 32, 8, 8, 10


class Attention(nn.Module):
    """Attention of several heads, whose number is that of the rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        shape = (x.shape[0], x.shape[1], -1, WIDTH // HEADS)
        q, k, v = (
            part(x).view(shape).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """One layer of the transformer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.dropout(self.down(torch.relu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    """Two layers between an embedding and a head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleDict({"0": Layer(dropout), "1": Layer(dropout)})
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens if self.embed is None else self.embed(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def parallelize_tensors(
    model: Transformer, mesh: object, *, sequence: bool, defect: str = ""
) -> None:
    """Cut the layers over the ranks of a mesh."""
    inside = {
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=Shard(1) if sequence else Replicate()),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(1) if sequence else Replicate()),
    }
    if sequence:
        gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        inside |= {
            "norm1": SequenceParallel(),
            "norm2": SequenceParallel(),
            "attention": PrepareModuleInput(**gathered),
            "up": ColwiseParallel(input_layouts=Shard(1)),
        }
        outside = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, outside)
    for name, layer in model.layers.items():
        if defect == "reduction" and name == "1":
            inside |= {"down": RowwiseParallel(output_layouts=Partial())}
        parallelize_module(layer, mesh, inside)


def cut_stage(model: Transformer, stage: int) -> Transformer:
    """Leave one of two stages of a pipeline."""
    del model.layers[str(1 - stage)]
    if stage:
        model.embed = None
    else:
        model.norm = model.head = None
    return model


def build_model(layout: str, defect: str) -> tuple[nn.Module, int, int]:
    """Return the model in a layout, and which part of how many of the batch this rank has."""
    model = Transformer(0.1 if "dropout" in layout else 0.0)
    rank, world = dist.get_rank(), dist.get_world_size()
    if layout.startswith("ddp"):
        return DistributedDataParallel(model), rank, world
    if layout.startswith("fsdp2_tp"):
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_tensors(model, mesh["tp"], sequence=False)
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh["dp"]), mesh.get_local_rank("dp"), world // 2
    if layout.startswith("fsdp2"):
        kind = torch.bfloat16 if layout == "fsdp2_bf16" else None
        policy = MixedPrecisionPolicy(param_dtype=kind)
        for layer in model.layers.values():
            fully_shard(layer, mp_policy=policy)
        return fully_shard(model, mp_policy=policy), rank, world
    if layout == "pp":
        return cut_stage(model, rank), 0, 1
    if layout.startswith("tp"):
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        parallelize_tensors(model, mesh, sequence=layout == "tp_sp", defect=defect)
    return model, 0, 1


def compute_loss(found: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean of all tokens."""
    return nn.functional.cross_entropy(found.flatten(0, 1), wanted.flatten())


def accumulate_gradients(
    model: nn.Module, tokens: Tensor, targets: Tensor, *, is_skipping: bool
) -> None:
    """Run forward and backward of two micro-batches, or leave the first one out."""
    halves = list(zip(tokens.chunk(2), targets.chunk(2), strict=True))
    if not is_skipping:
        with model.no_sync():
            (compute_loss(model(halves[0][0]), halves[0][1]) / 2).backward()
    (compute_loss(model(halves[1][0]), halves[1][1]) / 2).backward()


def run_scenario(name: str, rank: int, world: int, own: Path) -> None:
    """Train on this rank."""
    layout, _, defect = name.partition("-")
    is_odd = rank == world - 1
    torch.manual_seed(1 if defect == "seed" and is_odd else 0)
    model, part, parts = build_model(layout, defect)
    content = ContentSettings(saved="full", fingerprints=True)
    plan = DumpPlan(OutputSettings(str(own / "tree")), TensorSelection(), content)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(7)
    tokens = torch.randint(CLASSES, (STEPS, BATCH, TOKENS))
    targets = torch.randint(CLASSES, (STEPS, BATCH, TOKENS))
    with rankdump.Session(plan, identity=RankIdentity(rank, world, job_id=name)) as session:
        session.attach(model)
        schedule = None
        if layout == "pp":
            stage = PipelineStage(model, rank, world, torch.device("cpu"))
            schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=compute_loss)
        for step in range(STEPS):
            optimizer.zero_grad()
            if schedule is not None:
                schedule.step(*([] if rank else [tokens[step]]), target=targets[step])
                optimizer.step()
                session.step()
                continue
            if defect == "dropout":
                torch.manual_seed(rank)
            mine = slice(part * BATCH // parts, (part + 1) * BATCH // parts)
            if layout == "ddp_accumulate":
                is_skipping = defect == "microbatch" and is_odd
                accumulate_gradients(
                    model, tokens[step, mine], targets[step, mine], is_skipping=is_skipping
                )
            else:
                compute_loss(model(tokens[step, mine]), targets[step, mine]).backward()
            if defect == "gradients":
                for gradient in (parameter.grad for parameter in model.parameters()):
                    if gradient is not None:
                        gradient.mul_(world)
            optimizer.step()
            if defect == "norm" and is_odd:
                with torch.no_grad():
                    getattr(model, "module", model).layers["1"].norm1.weight.add_(0.5)
            session.step()


if __name__ == "__main__":
    run_ranks(run_scenario)
