"""Input of the documents' commands: scripts, configurations, and trees of every kind."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from support import overflow_files
from support.bin_conversion import NAME, bin_file, blocks, numbered, tensor
from support.cann_trees import CannTree
from support.tree_builder import TreeBuilder

from rankdump._core.record import TensorSide

ASKED_LINE = 24
"""Where scripts call the model: the documents ask what came from `train.py:24`."""

NETWORK = """\
import os, torch, torch.distributed as dist
from torch import nn
def train(model, batch=None):
    for each in loader[:2] if batch is None else [batch]:
        optimizer.zero_grad()
        model(each).sum().backward()
        optimizer.step()
torch.manual_seed(int(os.environ.get("SEED", "0")))
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
    def forward(self, x):
        return torch.relu(self.fc(x))
class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)
    def forward(self, x):
        return self.fc(x)
encoder, head = Encoder(), Head()
model = net = nn.Sequential(encoder, head)
if "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
loader = batches = [torch.ones(2, 4) * (1 + step) for step in range(9)]
"""
"""A small network, its batches and a step, under the names that the snippets use."""

OPTIMIZER = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
"""Only for snippets that train: a third of torch is imported for it."""

GRAPH = """# IR entry: @kernel_graph0
subgraph @kernel_graph0() {
  %0(equiv_1) = AllReduce(%1) {}
      # Fullname with scope: (Default/AllReduce-op0)
      # In file /data/samples/scripts/train_2rank.py:25/  g0 = self.ar(g[0]); l = ops.depend(l, g0)/
  %1(equiv_2) = Depend(%0)
      # Fullname with scope: (Default/Depend-op0)
      # In file /data/samples/scripts/train_2rank.py:25/  g0 = self.ar(g[0]); l = ops.depend(l, g0)/
}
"""


def data_dump(path: str, *, iteration: str = "all") -> str:
    """Return a configuration of every operator of two ranks."""
    common = {
        "dump_mode": 0,
        "path": path,
        "net_name": "Net",
        "iteration": iteration,
        "input_output": 0,
        "kernels": [],
        "support_device": [0, 1],
    }
    switches = {"enable": True, "trans_flag": True}
    return json.dumps({"common_dump_settings": common, "e2e_dump_settings": switches})


def two_ranks(root: Path) -> None:
    """The tree of the samples in `docs/reading.md`: 29 operators, iterations 0, 2 and 3."""
    tree, random = TreeBuilder(root), np.random.default_rng(0)
    bias = "Default/net-WithLossCell/_backbone-Net/fc1-Dense/BiasAdd-op0"
    rest = [f"Default/net-WithLossCell/layer{number}-Dense/MatMul-op0" for number in range(26)]
    for rank in (0, 1):
        tree.graph(rank, GRAPH)
        for iteration in (0, 2, 3):
            shapes: list[tuple[str, tuple[int, ...]]] = [
                ("Default/net-WithLossCell/_backbone-Net/conv1-Conv2d/Conv2D-op0", (8, 2, 6, 6)),
                (bias, (8, 4)),
                ("Default/AllReduce-op0", (4,)),
                *((name, (2, 2)) for name in rest),
            ]
            for name, shape in shapes:
                tree.tensor(rank, iteration, name, random.standard_normal(shape, np.float32))
            given = np.ones((8, 4), np.float32)
            tree.tensor(rank, iteration, bias, given, side=TensorSide.INPUT)
            tree.complete(rank, iteration)


def with_nan(root: Path) -> None:
    """A tree with a tensor that is not finite."""
    tree = TreeBuilder(root)
    for side in (TensorSide.INPUT, TensorSide.OUTPUT):
        values = np.array([np.nan, np.inf, -np.inf, 1], np.float32)
        tree.tensor(0, 1, "Default/Abs-op7", values, side=side)
    tree.complete(0, 1, world_size=1)


def with_statistics(root: Path) -> None:
    """A tree with statistics of gradients and of outputs, and with elements in one iteration."""
    tree, random = TreeBuilder(root), np.random.default_rng(0)
    for rank in (0, 1):
        for iteration in (0, 120):
            for name in ("Gradients/embed.weight", "Gradients/classify.weight"):
                values = random.standard_normal(512).astype(np.float32)
                tree.tensor(rank, iteration, name, values, op_type="Parameter", tabled=True)
            for layer in range(3):
                name = f"Default/network-Net/{layer}-Linear/Linear-op{layer}"
                tree.row(rank, iteration, name, random.standard_normal(8).astype(np.float32))
            tree.complete(rank, iteration)


def of_a_device(root: Path) -> None:
    """CANN's tree of one operator."""
    half = np.float16
    inputs = {0: np.ones((2, 3), half), 1: np.ones((3, 4), half)}
    CannTree(root).operator(3, "fc/MatMul-op0", inputs, {0: np.ones((2, 4), half)})


def bin_files(folder: Path) -> None:
    """Three tensors in two files, and a file that is cut off."""
    folder.mkdir(parents=True)
    image, product = numbered((2, 20, 3, 5)), numbered((4, 2, 16, 16))
    sides = [tensor(side, blocks(image), "NC1HWC0", (2, 20, 3, 5)) for side in ("input", "output")]
    (folder / NAME).write_bytes(bin_file(*sides))
    matmul = "MatMul.Default_fc-op5.9.12.1719000000123999"
    (folder / matmul).write_bytes(bin_file(tensor("output", product, "FRACTAL_NZ", (30, 50))))
    cast = bin_file(tensor("output", numbered((8,))))
    (folder / "Cast.Default_Cast-op1.3.12.1719000000120000").write_bytes(cast[:-1])


def overflows(folder: Path) -> None:
    """What CANN recorded of an operator that overflowed."""
    folder.mkdir(parents=True)
    record = overflow_files.debug_file(
        overflow_files.old(core=overflow_files.CORE, status=(0, 0, 0x120))
    )
    (folder / "Opdebug.Node_OpDebug.12.7.1795284000123456").write_bytes(record)
    operator = "Conv2D.Default_conv1-Conv2d_Conv2D-op0.12.7.1795284000123000"
    (folder / operator).write_bytes(bin_file(tensor("output", numbered((2, 2)))))


def script(path: Path, *parts: str) -> None:
    """Write a script: the network, then what a document says."""
    call = next(n for n, line in enumerate(NETWORK.splitlines(), 1) if "model(each)" in line)
    end = "if dist.is_initialized():\n    dist.destroy_process_group()\n"
    trains = any(word in part for part in parts for word in ("optimizer", "train("))
    network = NETWORK + OPTIMIZER if trains else NETWORK
    path.write_text("\n" * (ASKED_LINE - call) + "\n".join([network, *parts, end]))
