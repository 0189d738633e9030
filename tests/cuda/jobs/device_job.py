"""Job whose tensors are on an accelerator.

Run as `device_job.py DEVICE SCENARIO FOLDER`. It writes to the folder what the job itself saw: the
bits of its losses, and of each output of a leaf module a digest that it made itself, without
rankdump. `DEVICE` may be `cpu` where a scenario needs nothing of an accelerator.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

import rankdump

STEPS = 4
BAD_STEP = 12
BLACK_BOX_STEPS = 20
LARGE_TENSORS = 160
"""Of 4 MiB: 640 MiB together."""

Journal = dict[str, Any]


class Scale(nn.Module):
    """Multiplies by a number that goes wrong."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Net(nn.Module):
    """Linear maps, a normalisation and an embedding."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.scale = Scale()
        self.drop = nn.Dropout(0.1)
        self.contract = nn.Linear(4 * width, width)
        self.head = nn.Linear(width, 100)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.contract(self.drop(self.scale(torch.relu(self.expand(self.norm(x))))))
        return self.head(x)


class Training:
    """A model, its optimizer, and batches that are the same in each run."""

    def __init__(self, device: str, *, autocast: bool = False) -> None:
        torch.manual_seed(0)
        self.device, self.autocast = device, autocast
        self.net = Net().to(device)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        self.losses: list[float] = []

    def forward(self, number: int) -> Tensor:
        """Return the loss of a step."""
        random = torch.Generator().manual_seed(number)
        tokens = torch.randint(100, (2, 8, 16), generator=random).to(self.device)
        kind = torch.device(self.device).type
        with torch.autocast(kind, torch.bfloat16, enabled=self.autocast):
            scores = self.net(tokens[0])
        return nn.functional.cross_entropy(scores.float().flatten(0, 1), tokens[1].flatten())

    def step(self, number: int) -> Tensor:
        """Run a step without anything that waits for the device; return its loss."""
        self.optimizer.zero_grad()
        loss = self.forward(number)
        loss.backward()
        self.optimizer.step()
        return loss


def digest(tensor: Tensor) -> str:
    """Return a digest of the bits of a tensor, of types that numpy lacks in float32."""
    if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn):
        tensor = tensor.float()
    flat = tensor.detach().resolve_conj().contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def watch_outputs(net: nn.Module, seen: dict[str, list[str]]) -> None:
    """Keep a digest of each output of a leaf module, by its name, in the order of calls."""

    def keep(name: str) -> Callable[..., None]:
        return lambda _module, _inputs, output: seen.setdefault(name, []).append(digest(output))

    for name, module in net.named_modules():
        if not list(module.children()):
            module.register_forward_hook(keep(name))


def bits(number: float) -> str:
    return struct.pack("<d", number).hex()


def train(device: str, *, autocast: bool = False, watched: bool = True) -> Journal:
    training, seen = Training(device, autocast=autocast), {}
    if watched:
        watch_outputs(training.net, seen)
    session = rankdump.attach(training.net)
    losses: list[Tensor] = []
    for number in range(STEPS):
        session.step(number)
        losses.append(training.step(number).detach())
    session.close()
    return {"losses": [bits(loss.item()) for loss in losses], "outputs": seen}


def train_with_autocast(device: str) -> Journal:
    return train(device, autocast=True)


def overwrite(device: str) -> Journal:
    """Write over each tensor right after it was handed over, on two streams in turns, far beyond
    the limit of copies in flight; then hand over types and layouts that need care.
    """
    session, seen = rankdump.Session.from_environment(), {}
    session.step(0)
    source = torch.arange(1 << 20, device=device, dtype=torch.float32)
    seen = {f"Large-op{number}": digest(source + number) for number in range(LARGE_TENSORS)}
    streams = [torch.cuda.Stream() for _ in "ab"] if source.is_cuda else [None]
    for number in range(LARGE_TENSORS):
        with torch.cuda.stream(streams[number % len(streams)]):
            tensor = source + number
            session.dump("Large", f"Large-op{number}", "output", 0, tensor)
            tensor.fill_(-1)
    for name, tensor in make_small_tensors(device).items():
        seen[f"{name}-op0"] = digest(tensor)
        session.dump(name, f"{name}-op0", "output", 0, tensor)
    session.step(1)
    session.close()
    return {"outputs": seen}


def make_small_tensors(device: str) -> dict[str, Tensor]:
    """Return tensors of all types, some of whose elements do not lie one behind the other."""
    base = torch.randn(6, 10, device=device)
    return {
        "transposed": base.t(),
        "every_second": base.to(torch.bfloat16)[::2, 1::3],
        "float8": base.to(torch.float8_e4m3fn),
        "bool": base > 0,
        "scalar": base.sum(),
        "empty": base[:0],
        "conjugated": torch.view_as_complex(base.reshape(30, 2)).conj(),
        "half": base.half(),
        "double": base.double(),
        "bytes": base.to(torch.int8).view(torch.uint8),
        "expanded": base[:, :1].expand(6, 5),
    }


def capture_graph(device: str) -> Journal:
    """Capture the forward of an attached model into a CUDA graph, and replay it."""
    net = Net().to(device).eval()
    tokens = torch.randint(100, (8, 16), device=device)
    session = rankdump.attach(net)
    with torch.no_grad():
        session.step(0)
        expected = net(tokens)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            net(tokens)
        torch.cuda.current_stream().wait_stream(side)
        session.step(1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = net(tokens)
        session.step(2)
        graph.replay()
        same = torch.equal(result, expected)
    session.close()
    return {"same": same}


def black_box(device: str) -> Journal:
    training = Training(device)
    session = rankdump.attach(training.net)
    losses = []
    for number in range(BLACK_BOX_STEPS):
        session.step(number)
        training.net.scale.factor = float("nan") if number == BAD_STEP else 1.0
        loss = training.forward(number)
        losses.append(loss.detach())
        if number != BAD_STEP:
            training.optimizer.zero_grad()
            loss.backward()
            training.optimizer.step()
    session.close()
    return {"losses": [bits(loss.item()) for loss in losses]}


def replay(device: str) -> Journal:
    """Replay a step that has the same bits, then one that adds rows in no fixed order."""
    training = Training(device)
    session = rankdump.attach(training.net)
    reports: list[Any] = []
    losses = []
    for number in range(STEPS):
        session.step(number)
        losses.append(session.replay(training.step, number).detach())
        reports.append(session.last_replay)
    plain = Training(device)
    unhooked = [plain.step(number).detach() for number in range(STEPS)]
    session.close()
    return {
        "losses": [bits(loss.item()) for loss in losses],
        "plain": [bits(loss.item()) for loss in unhooked],
        "same": [each.is_deterministic for each in reports],
        "texts": [str(each) for each in reports],
        "compared": [each.compared for each in reports],
    }


class ScatterSum(nn.Module):
    """Adds a million rows into three sums, in the order in which threads of the device come."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1 << 20))

    def forward(self, places: Tensor) -> Tensor:
        sums = torch.zeros(3, device=places.device)
        return sums.index_add(0, places, self.weight)


def replay_scatter(device: str) -> Journal:
    torch.manual_seed(0)
    net = nn.Sequential(ScatterSum(), nn.Identity()).to(device)
    places = torch.randint(3, (1 << 20,), device=device)
    session = rankdump.attach(net)
    session.step(0)
    session.replay(lambda: net(places).sum().backward())
    report: Any = session.last_replay
    session.close()
    return {"same": report.is_deterministic, "text": str(report)}


def compile_net(device: str) -> Journal:
    training = Training(device)
    session = rankdump.attach(training.net, inside_compiled=True)
    training.net.compile()
    losses = []
    for number in range(STEPS):
        session.step(number)
        losses.append(training.step(number).detach())
    session.close()
    return {"losses": [loss.item() for loss in losses]}


def reduce_with_nccl(device: str) -> Journal:
    """One rank of NCCL: its collectives have the order of the calls and ends of their own."""
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    net = nn.Linear(8, 8).to(device)
    session = rankdump.attach(net)
    for number in range(STEPS):
        session.step(number)
        x = net(torch.ones(4, 8, device=device))
        dist.all_reduce(x.detach())
        work = dist.all_gather([torch.empty_like(x)], x.detach(), async_op=True)
        assert work is not None
        work.wait()
    session.close()
    dist.destroy_process_group()
    return {}


SCENARIOS: dict[str, Callable[[str], Journal]] = {
    "train": train,
    "autocast": train_with_autocast,
    "overwrite": overwrite,
    "graph": capture_graph,
    "black_box": black_box,
    "replay": replay,
    "scatter": replay_scatter,
    "compiled": compile_net,
    "nccl": reduce_with_nccl,
}

if __name__ == "__main__":
    device, scenario, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    # Products of matrices have the same bits in each run.
    torch.use_deterministic_algorithms(scenario in ("train", "autocast", "replay"))
    journal = SCENARIOS[scenario](device)
    (folder / "journal.json").write_text(json.dumps(journal))
