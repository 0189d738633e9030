"""Selection of operators by model, through a real agent, in a tree with model folders."""

# torch types what stands in a module as `Tensor | Module`.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rankdump
from rankdump._core.manifest import Manifest
from rankdump._core.plan import (
    ContentSettings,
    DumpPlan,
    OperatorSelection,
    OutputSettings,
    SavedDataMode,
    TensorExclusion,
    TensorSelection,
    TriggerMode,
)

STARTED = "20260102030405"


class Lenet(nn.Module):
    """Two layers with operators between them."""

    def __init__(self, raises: bool = False, scale: float = 1.0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 2, 3)
        self.act = nn.ReLU()
        self.fc = nn.Linear(2 * 36, 3)
        self.raises, self.scale = raises, scale

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.conv1(x)) * self.scale
        if self.raises:
            return self.fc(x)
        return self.fc(x.flatten(1))


def a_plan(
    root: Path, trigger: TriggerMode = "always", saved: SavedDataMode = "tensor", **lists
) -> DumpPlan:
    return DumpPlan(
        OutputSettings(str(root), net_name="", layout="cann", codec="none", started=STARTED),
        TensorSelection(trigger=trigger, **lists),
        ContentSettings(saved=saved),
        dialect="acl",
    )


def listed(*names: str, **more) -> OperatorSelection:
    return OperatorSelection(False, names, spelt=True, **more)


@pytest.fixture
def start(make_agent, short_dir):
    agent = make_agent()

    def started(**settings) -> rankdump.Session:
        return rankdump.Session(a_plan(short_dir / "dump", **settings), agent=agent.address)

    return started


def step(model: nn.Module) -> None:
    torch.manual_seed(0)
    model(torch.randn(1, 1, 8, 8, requires_grad=True)).sum().backward()


def manifests(root: Path) -> list[Manifest]:
    folder = root / "rank_0/.dump_metadata/manifest"
    return [Manifest.from_json(path.read_bytes()) for path in folder.rglob("*.json")]


def names_in(folder: Path) -> set[str]:
    """Return types and sides of the tensors in an iteration of a model."""
    parts = [path.name.split(".") for path in folder.glob("*.npy")]
    return {f"{fields[0]}.{fields[-4]}.{fields[-3]}" for fields in parts}


def test_model_has_only_the_operators_of_its_own_list(start, short_dir):
    """The list of one model selects nothing in another, and the balances are right."""
    models = (("first", listed("conv1")), ("second", listed("fc", "nothing")))
    with start(operators=listed("act"), models=models) as session:
        nets = [Lenet() for _ in range(3)]
        for net, name in zip(nets, ("first", "second", ""), strict=True):
            session.attach(net, name)
        for net in nets:
            step(net)
    device = short_dir / "dump" / STARTED / "0"
    both = {"input.0", "output.0"}
    assert names_in(device / "first/0/0") == {f"Conv2d.{side}" for side in both}
    assert names_in(device / "second/1/0") == {f"Linear.{side}" for side in both}
    assert names_in(device / "Lenet/2/0") == {f"ReLU.{side}" for side in both}
    (manifest,) = manifests(short_dir / "dump")
    assert (manifest.status.expected, manifest.status.stored) == (12, 12)


def test_blacklisted_positions_are_excluded_from_every_call(start, short_dir):
    """The rank applies the blacklist, so that the agent has no record to drop."""
    lists = OperatorSelection(
        without_types=(TensorExclusion("Conv2d"), TensorExclusion("Parameter")),
        without_names=(
            TensorExclusion("fc", ("output0",)),
            TensorExclusion("Lenet"),
            TensorExclusion("network-Lenet"),
        ),
    )
    with start(operators=lists) as session:
        session.attach(net := Lenet())
        step(net)
    folder = short_dir / "dump" / STARTED / "0/Lenet/0/0"
    assert names_in(folder) == {"ReLU.input.0", "ReLU.output.0", "Linear.input.0"}
    (manifest,) = manifests(short_dir / "dump")
    # Forward and backward of both.
    assert (manifest.status.expected, manifest.status.dropped) == (6, {})


def test_range_selects_a_section_of_the_program(start, short_dir):
    """An operator is in the range if it begins there; the network itself began before and is not
    dumped.
    """
    with start(operators=listed(ranges=(("act", "fc"),))) as session:
        session.attach(net := Lenet())
        for i in range(2):
            session.step(i)
            step(net)
    for i in range(2):
        folder = short_dir / "dump" / STARTED / f"0/Lenet/0/{i}"
        kinds = {name.partition(".")[0] for name in names_in(folder)}
        assert kinds == {"ReLU", "Linear"}
    assert [m.status.dropped for m in manifests(short_dir / "dump")] == [{}, {}]


def operators_by_stamp(root: Path) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for record in (record for manifest in manifests(root) for record in manifest.records):
        found.setdefault(record.timestamp_us, set()).add(f"{record.op_name}")
    return found


@pytest.mark.parametrize("saved", ["tensor", "full"])
def test_tensors_of_an_overflowed_call_have_one_time(start, short_dir, saved):
    """All tensors of a call that is kept after its overflow have the time of that call."""
    with start(trigger="overflow", saved=saved) as session:
        session.attach(net := Lenet(scale=float("inf")))
        for i in range(2):
            session.step(i)
            step(net)
    by_stamp = operators_by_stamp(short_dir / "dump")
    forward = [names for names in by_stamp.values() if "Default/" in min(names)]
    assert forward
    assert all(len(names) == 1 for names in by_stamp.values())
    for manifest in manifests(short_dir / "dump"):
        calls = [(r.timestamp_us, r.op_name) for r in manifest.records]
        assert len(set(calls)) == len({name for _, name in calls})
        members = [(*call, r.member) for call, r in zip(calls, manifest.records, strict=True)]
        assert len(set(members)) == len(members)
        assert manifest.status.dropped == {}


class Repeating(nn.Module):
    """Recomputes a part of itself in the backward, and calls one module twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(checkpoint(self.inner, self.act(x), use_reentrant=False))


def test_every_call_has_its_own_time(start, short_dir):
    """Outer, inner and repeated calls and gradients have one time each, different from
    all others.
    """
    with start() as session:
        session.attach(net := Repeating())
        for i in range(2):
            session.step(i)
            net(torch.ones(1, 2, requires_grad=True)).sum().backward()
    root = short_dir / "dump"
    assert all(len(names) == 1 for names in operators_by_stamp(root).values())
    for manifest in manifests(root):
        names = {record.op_name for record in manifest.records}
        assert len({record.timestamp_us for record in manifest.records}) == len(names)
        assert {name.split("/")[0] for name in names} > {"Default", "Gradients", "Recompute"}
        members = [(r.timestamp_us, r.op_name, r.member) for r in manifest.records]
        assert len(set(members)) == len(members) == manifest.status.stored


def test_operator_that_raised_has_one_time_in_its_iteration(start, short_dir):
    net = Lenet()
    session = start(trigger="exception")
    session.attach(net)
    for i in range(3):
        session.step(i)
        net.raises = i == 2
        with contextlib.suppress(RuntimeError):
            step(net)
    session.close()
    folder = short_dir / "dump" / STARTED / "0/Lenet/0"
    assert [path.name for path in folder.iterdir()] == ["2"]
    assert names_in(folder / "2") == {"Linear.input.0"}


def test_arrays_belong_to_the_default_model(start, short_dir):
    """Graphs to which no model is attached belong to the model `Net`, and are selected by that
    name.
    """
    with start(
        operators=OperatorSelection(False), models=(("Net", OperatorSelection()),)
    ) as session:
        session.dump("Add", "Default/Add-op0", "output", 0, np.ones(2), graph=3)
    assert names_in(short_dir / "dump" / STARTED / "0/Net/3/0") == {"Add.output.0"}
