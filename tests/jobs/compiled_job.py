"""Job of one rank with a compiled model: losses and what was compiled, as one line of JSON.

Run as a program by the test beside it: backend, `plain`, `boundary`, `inside` or `ddp`, and a
folder for the process group.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel

import rankdump

STEPS, ROWS, WIDTH = 4, 16, 8


def make_model(kind: str, folder: str) -> nn.Module:
    """Return the model; of `ddp` one whose graph torch would split at the buckets."""
    model: nn.Module = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)
    )
    if kind == "ddp":
        dist.init_process_group("gloo", init_method=f"file://{folder}/s", rank=0, world_size=1)
        model = DistributedDataParallel(model, bucket_cap_mb=1)
    return model


def main() -> None:
    """Train with a loop as a script has it, and print what it computed."""
    backend, kind, folder = sys.argv[1:4]
    torch.set_num_threads(1)
    torch.manual_seed(1)
    plain = make_model(kind, folder)
    counter = CompileCounterWithBackend(backend)
    model: Any = torch.compile(plain, backend=counter)
    session = None
    if kind != "plain":
        session = rankdump.attach(model, inside_compiled=kind != "boundary")
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    losses: list[str] = []
    for step in range(STEPS):
        if session is not None:
            session.step(step)
        loss = model(torch.randn(ROWS, WIDTH)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()).hex())
    if session is not None:
        session.close()
    print(json.dumps({"losses": losses, "compilations": counter.frame_count}), flush=True)
    if kind == "ddp":
        # Threads of gloo now and then abort an interpreter that is finishing.
        os._exit(0)


if __name__ == "__main__":
    main()
