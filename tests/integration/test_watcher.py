"""Watched outputs through a real agent: memory that other operators write to."""

# torch types what stands in a module as `Tensor | Module`.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import gc
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rankdump
from rankdump._core.manifest import Manifest
from rankdump._core.plan import (
    DumpPlan,
    OperatorSelection,
    OutputSettings,
    TensorSelection,
    WatchedOperators,
)

STARTED = "20260102030405"
NAME = re.compile(
    r"Linear\.(Default_network-Net_(?P<layer>\w+)-\w+_\w+-op0_To_)?"
    r"Default_network-Net_first-Linear_Linear-op0\.65535\.65535\.[0-9]{16}\.output\.0\.\w+\.npy"
)


class OverwritingLayer(nn.Module):
    """Writes into the output of another operator."""

    def __init__(self, victims: list[Tensor]) -> None:
        super().__init__()
        self.victims = victims

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for victim in self.victims:
                victim.data[0, 0] = 77
        return x + 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.victims: list[Tensor] = []
        self.first = nn.Linear(2, 3)
        self.calm = nn.Identity()
        self.wild = OverwritingLayer(self.victims)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.victims[:] = [x.detach()]
        return self.wild(self.calm(x.clone()))


def a_plan(root: Path, layers: tuple[str, ...], nodes: tuple[str, ...]) -> DumpPlan:
    return DumpPlan(
        OutputSettings(str(root), net_name="", layout="cann", codec="none", started=STARTED),
        TensorSelection(
            operators=OperatorSelection(False),
            inputs=False,
            watched=WatchedOperators(layers, nodes),
        ),
        dialect="acl",
    )


@pytest.fixture
def start(make_agent, short_dir):
    agent = make_agent()

    def started(layers: tuple[str, ...], nodes: tuple[str, ...]) -> rankdump.Session:
        plan = a_plan(short_dir / "dump", layers, nodes)
        return rankdump.Session(plan, agent=agent.address)

    return started


def manifests(root: Path) -> list[Manifest]:
    folder = root / "rank_0/.dump_metadata/manifest"
    return [Manifest.from_json(path.read_bytes()) for path in folder.rglob("*.json")]


def test_watched_output_shows_the_layer_that_overwrote_it(start, short_dir):
    """Each file has the content after its layer, and a name that has both operators."""
    with start(("calm", "wild"), ("first",)) as session:
        session.attach(net := Net())
        for i in range(2):
            session.step(i)
            net(torch.zeros(1, 2)).sum().backward()
    for i in range(2):
        folder = short_dir / "dump" / STARTED / f"0/Net/0/{i}"
        found = {}
        for path in folder.glob("*.npy"):
            match = NAME.fullmatch(path.name)
            assert match, path.name
            found[match["layer"]] = np.load(path)
        bias = net.first.bias.detach().numpy()
        assert set(found) == {None, "calm", "wild"}
        assert np.array_equal(found[None][0], bias)
        assert np.array_equal(found["calm"][0], bias)
        assert found["wild"][0].tolist() == [77, *bias[1:].tolist()]
    for manifest in manifests(short_dir / "dump"):
        assert (manifest.status.expected, manifest.status.stored) == (3, 3)
        assert manifest.status.dropped == {}


class NotedOperator(torch.autograd.Function):
    """An operator that records when its part of the graph is freed."""

    gone = 0

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.note = GraphNote()
        return x * 2

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


class GraphNote:
    """Object that only a graph refers to."""

    def __del__(self) -> None:
        NotedOperator.gone += 1


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return NotedOperator.apply(x)  # pyright: ignore[reportReturnType]


def losses(session: rankdump.Session) -> tuple[list[float], list[int]]:
    """Train; return the losses, and how many graphs were freed before each next iteration."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 8), Doubling(), nn.ReLU(inplace=True), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    session.attach(net)
    found, gone, NotedOperator.gone = [], [], 0
    for i in range(4):
        session.step(i)
        loss = net(torch.randn(3, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
        del loss
        gc.collect()
        gone.append(NotedOperator.gone)
    return found, gone


def test_watching_changes_no_result(start):
    """Watching changes no result, and keeps no graph of gradients alive."""
    plain = losses(rankdump.Session())
    assert plain[1] == [1, 2, 3, 4]
    relu = "Gradients/Default/network-Sequential/2-ReLU/ReLU-op0"
    with start(("1", "3"), ("0", "1", "2", relu)) as session:
        assert losses(session) == plain


def test_freed_watched_memory_is_counted_as_drop(start, short_dir):
    """A tensor whose memory was freed is a loss with its reason, not a crash."""
    with start(("1", "2"), ("0",)) as session:
        net = nn.Sequential(nn.Linear(2, 2), nn.Identity(), nn.Identity())
        session.attach(net)
        with torch.no_grad():
            kept = net[0](torch.ones(1, 2))
            net[1](torch.ones(1))
            kept.untyped_storage().resize_(4)
            net[2](torch.ones(1))
    (manifest,) = manifests(short_dir / "dump")
    assert (manifest.status.expected, manifest.status.stored) == (3, 2)
    assert manifest.status.dropped == {"storage_freed": 1}
