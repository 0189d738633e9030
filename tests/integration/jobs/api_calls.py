"""Job that dumps the API calls of a small net with a script written for troubleshooter.

Arguments: a list of runs as JSON, each with `init` and `start` (parameters of the calls), `steps`,
and `end` (how the script ends in the middle of the last step; empty for in good order).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import rankdump as ts

WIDTH = 4


class Residual(nn.Module):
    """Adds its input to the output of its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.bn = nn.BatchNorm2d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made = self.bn(self.conv(x))
        return functional.relu(x + made)


class Net(nn.Module):
    """Functions, methods, operators, and modules with and without parts."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.blocks = nn.Sequential(Residual(), Residual())
        self.drop = nn.Dropout(0.5)
        self.fc1 = nn.Linear(WIDTH * 16, 16)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(functional.max_pool2d(self.stem(x), 2))
        x = self.drop(x.permute(0, 2, 3, 1).reshape(x.shape[0], -1))
        x = self.act(self.fc1(x))
        x = torch.matmul(x, self.fc2.weight.t()) + self.fc2.bias
        return functional.log_softmax(x, dim=-1)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return images and their classes."""
    source = torch.Generator().manual_seed(100 + step)
    images = torch.randn(2, 3, 8, 8, generator=source)
    return images, torch.randint(0, 10, (2,), generator=source)


def end(how: str) -> None:
    """End the script within its last step: by an exception, an interrupt or SIGKILL."""
    if how == "raise":
        raise ZeroDivisionError
    os.kill(os.getpid(), {"interrupt": signal.SIGINT, "kill": signal.SIGKILL}[how])


def wait_for_ring() -> None:
    """Wait for the shared memory of the agent: what is dumped before dies with this process."""
    window: Any = ts.migrator._process._window  # pyright: ignore[reportPrivateUsage]
    while window.session._pipeline._send_buffer.ring is None:
        time.sleep(0.01)


def run(init: dict[str, Any], start: dict[str, Any], steps: int = 2, how: str = "") -> None:
    """Dump some steps of a training; the dump is started before the first of them."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = nn.parallel.DistributedDataParallel(net) if dist.is_initialized() else net
    ts.migrator.api_dump_init(model, **init)
    for step in range(steps):
        images, classes = batch(step)
        if not step:
            ts.migrator.api_dump_start(**start)
            if how:
                wait_for_ring()
        optimizer.zero_grad()
        loss = functional.nll_loss(model(images), classes)
        if how and step == steps - 1:
            end(how)
        loss.backward()
        optimizer.step()
    ts.migrator.api_dump_stop()


def main() -> None:
    """Execute all runs."""
    torch.set_num_threads(1)
    if "MASTER_PORT" in os.environ:
        dist.init_process_group("gloo")
    for each in json.loads(sys.argv[1]):
        run(each["init"], each.get("start", {}), each.get("steps", 2), each.get("end", ""))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
