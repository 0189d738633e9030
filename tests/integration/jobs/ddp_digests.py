"""Job of two DDP ranks that digest, with hooks of their own, the tensors that rankdump dumps.

torchrun --nproc-per-node 2 ddp_digests.py FOLDER: writes FOLDER/rank_N.json, a list of
[iteration, op type or parameter name, side, slot, sha256].
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankdump

STEPS = 3


class Net(nn.Module):
    """Convolution, normalisation, an in-place operator, attention, keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
        self.out = nn.Linear(16, 10)

    def forward(self, images: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        rows = self.relu(self.norm(self.conv(images))).flatten(2) * scale
        seen, _ = self.attend(rows, rows, rows, need_weights=False)
        return self.out(seen.mean(dim=1))


class Digests:
    """Digests of the tensors that the hooks received."""

    def __init__(self) -> None:
        self.iteration = 0
        self.seen: list[list[object]] = []

    def add(self, name: str, side: str, slot: int, tensor: object) -> None:
        if isinstance(tensor, torch.Tensor):
            data = tensor.detach().contiguous().numpy().tobytes()
            digest = hashlib.sha256(data).hexdigest()
            self.seen.append([self.iteration, name, side, slot, digest])

    def before(self, module: nn.Module, args: tuple[object, ...]) -> None:
        for slot, argument in enumerate(args):
            self.add(type(module).__name__, "input", slot, argument)

    def after(self, module: nn.Module, _args: tuple[object, ...], result: object) -> None:
        results = result if isinstance(result, tuple) else (result,)
        for slot, tensor in enumerate(results):
            self.add(type(module).__name__, "output", slot, tensor)


def train(rank: int) -> list[list[object]]:
    """Train for a few steps; return the digests."""
    torch.manual_seed(0)
    net = Net()
    digests = Digests()
    for module in net.modules():
        module.register_forward_pre_hook(digests.before)
        module.register_forward_hook(digests.after)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session = rankdump.attach(model)
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        session.step(step)
        digests.iteration = step
        optimizer.zero_grad()
        images = torch.randn(8, 1, 4, 4, generator=generator)
        loss = model(images, scale=0.5).square().mean()
        loss.backward()
        for name, parameter in net.named_parameters():
            digests.add(f"Gradients/{name}", "output", 0, parameter.grad)
        optimizer.step()
        for name, state in net.state_dict().items():  # parameters and running statistics
            digests.add(name, "output", 0, state)
        dist.barrier()
    session.close()
    return digests.seen


def main() -> None:
    dist.init_process_group("gloo")
    seen = train(dist.get_rank())
    Path(sys.argv[1], f"rank_{os.environ['RANK']}.json").write_text(json.dumps(seen))
    gc.collect()  # gloo's threads, held by the model, must not outlive the interpreter
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
