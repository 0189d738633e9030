"""Jobs of one rank with a compiled model: losses and what was compiled, as one line of JSON.

compiled_job.py BACKEND FOLDER KIND...: forks a job for each kind, `plain`, `boundary`, `inside` or
`ddp`, one after the other. A job has the configuration FOLDER/KIND/data_dump.json, but for `plain`,
and writes what it prints and logs to FOLDER/KIND/log.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_processes import fork_ranks
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


def train(backend: str, kind: str, folder: str) -> None:
    """Train with a loop as a script has it, and print what it computed."""
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


def run_job(backend: str, kind: str, folder: Path) -> None:
    """Run one job in this process."""
    with (folder / "log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if kind != "plain":
        os.environ["RANKDUMP_CONFIG"] = str(folder / "data_dump.json")
        os.environ["RANKDUMP_JOB_ID"] = kind
    train(backend, kind, str(folder))


def main() -> None:
    """Import torch once for all jobs."""
    backend, folder, *kinds = sys.argv[1:]

    def run_in_child(kind: str) -> int:
        return fork_ranks(1, lambda rank: run_job(backend, kind, Path(folder) / kind))

    sys.exit(max(map(run_in_child, kinds)))


if __name__ == "__main__":
    main()
