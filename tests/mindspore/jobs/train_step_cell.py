"""Trains a network with `nn.TrainOneStepCell` or `Model.train`, on one rank or several.

What it prints is all that the job computes: it must not depend on a dump.
"""

from __future__ import annotations

import argparse
import hashlib
from importlib import import_module
from typing import Any

import numpy as np

import rankdump

ms: Any = import_module("mindspore")
nn = ms.nn
STEPS = 4


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Dense(4, 8)
        self.act = nn.ReLU()
        self.fc2 = nn.Dense(8, 2)

    def construct(self, x: Any) -> Any:
        return self.fc2(self.act(self.fc1(x)))


class Steps(ms.Callback):
    """Begins an iteration where `Model.train` begins a step, and shows each loss."""

    def on_train_step_begin(self, run_context: Any) -> None:
        rankdump.step(run_context.original_args().cur_step_num - 1)

    def on_train_step_end(self, run_context: Any) -> None:
        found = run_context.original_args()
        show(found.cur_step_num - 1, found.net_outputs)


def show(iteration: int, loss: Any) -> None:
    print(f"rank {rank} step {iteration} loss {loss.asnumpy().tobytes().hex()}", flush=True)


parser = argparse.ArgumentParser()
parser.add_argument("mode", choices=("graph", "pynative"))
parser.add_argument("--ranks", action="store_true", help="train data-parallel with all ranks")
parser.add_argument("--mark", choices=("rankdump", "mindspore"), help="whose set_dump marks fc1")
parser.add_argument("--model", action="store_true", help="train with Model.train and a callback")
asked = parser.parse_args()

ms.set_context(mode=ms.GRAPH_MODE if asked.mode == "graph" else ms.PYNATIVE_MODE)
rank = 0
if asked.ranks:
    ms.set_device("CPU")
    ms.communication.init()
    rank = ms.communication.get_rank()
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
ms.set_seed(1)
np.random.seed(1)
net = Net()
if asked.mark:
    (rankdump if asked.mark == "rankdump" else ms).set_dump(net.fc1)
optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
samples = np.random.default_rng(rank).standard_normal((STEPS * 2, 4)).astype(np.float32)
targets = np.zeros((STEPS * 2, 2), np.float32)
session = rankdump.attach(net)
if asked.model:
    data = ms.dataset.NumpySlicesDataset((samples, targets), shuffle=False).batch(2)
    model = ms.Model(net, nn.MSELoss(), optimizer)
    model.train(1, data, callbacks=[Steps()], dataset_sink_mode=False)
else:
    step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer)
    step.set_train()
    for iteration in range(STEPS):
        session.step(iteration)
        rows = slice(2 * iteration, 2 * iteration + 2)
        show(iteration, step(ms.Tensor(samples[rows]), ms.Tensor(targets[rows])))
session.close()
state = b"".join(each.asnumpy().tobytes() for each in net.get_parameters())
print(f"rank {rank} state {hashlib.sha256(state).hexdigest()}", flush=True)
print("done", flush=True)
