"""Forecast and ledger size in the status of a running agent."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np
import pytest

from rankdump import reader
from rankdump._core.forecast import forecast_dump
from rankdump._core.plan import ContentSettings, TensorSelection
from rankdump._core.selection import parse_iterations
from rankdump._core.status import StatusView
from rankdump._wire.status_messages import view_from_wire
from rankdump.wire.v1 import agent_pb2

TENSORS = 40
MIB = 1 << 20
WAIT_S = 300


def selected(text: str) -> TensorSelection:
    iterations = parse_iterations(text)
    assert iterations is not None
    return TensorSelection(iterations)


class NoiseRank:
    """A rank that dumps iterations of noise, which cannot be compressed."""

    def __init__(self, rank, frames) -> None:
        self.rank, self._frames = rank, frames
        self._chance = np.random.default_rng(rank.rank)
        rank.open()
        self._stream, self._sequence = rank.push(), 0

    def dump(self, iteration: int, *, elements: int = 700) -> None:
        """Dump an iteration, and wait until its manifest is written."""
        for number in range(TENSORS):
            array = self._chance.standard_normal(elements * (1 + number % 7)).astype(np.float16)
            self._send(self._frames.record, array, iteration=iteration, op_name=f"N/{number}/X-op0")
        self._send(self._frames.end, iteration, TENSORS)
        self._stream.wait_acknowledged(self._sequence)
        # Acknowledged is committed; the balance comes with the effect.
        self.rank.drain()

    def leave(self) -> None:
        """End the session."""
        self._send(self._frames.goodbye)
        self._stream.wait_acknowledged(self._sequence)
        self._stream.finish()

    def _send(self, make: Callable[..., agent_pb2.Frame], *args, **about) -> None:
        self._sequence += 1
        self._stream.send(make(self._sequence, *args, **about))

    def view(self) -> StatusView:
        return view_from_wire(self.rank.status())

    def wait_said(self, text: str) -> None:
        """Wait until the status reports this, or nothing; disks are sampled once a second."""
        until_s = time.monotonic() + WAIT_S
        while text not in (said := "".join(self.view().findings)) or bool(text) != bool(said):
            assert time.monotonic() < until_s, said


@pytest.fixture
def make_dumping(make_rank, frames):
    return lambda address, **about: NoiseRank(make_rank(address, **about), frames)


def about(number: int) -> dict[str, object]:
    return {"rank": number, "world_size": 2, "session_id": f"session{number}"}


@pytest.mark.parametrize(
    "content", [ContentSettings(), ContentSettings("full", ("max", "min"))], ids=["", "full"]
)
def test_status_forecast_agrees_with_the_command(make_agent, make_dumping, content):
    """The command measures each file, the agent has sums: they differ by a few hundredths."""
    agent = make_agent()
    ranks = [
        make_dumping(agent.address, **about(n), selection=selected("0-99"), content=content)
        for n in range(2)
    ]
    for rank in ranks:
        rank.dump(0)
    (need,) = ranks[0].view().needs
    assert need.iterations == 99
    seen = reader.observe(ranks[0].rank.root)
    foretold = forecast_dump(seen, 99, reader.disk_room(ranks[0].rank.root, 0.0))
    assert 99 * need.disk_bytes == pytest.approx(foretold.disk_bytes, rel=0.05)
    assert 99 * need.inodes == pytest.approx(
        foretold.files + 99 * seen.per_iteration.folders, rel=0.05
    )


def test_plan_beyond_the_job_quota_is_warned_about(make_agent, make_dumping):
    """The warning comes when the first iteration has ended, and goes when no iteration remains."""
    agent = make_agent(job_bytes=4 * MIB)
    rank = make_dumping(agent.address, selection=selected("0-49"))
    assert rank.view().findings == ()
    rank.dump(0)
    (said,) = rank.view().findings
    assert said.startswith("job job: 49 more iterations need ")
    assert " more (agent.job_bytes): " in said
    rank.dump(48)
    assert rank.view().findings == ()
    (need,) = rank.view().needs
    assert need.iterations == 1
    rank.leave()
    assert rank.view().needs == ()


def test_plan_beyond_the_disk_space_is_warned_about(make_agent, make_dumping, monkeypatch):
    """By bytes, then by files; the warning goes when there is space."""
    free = {"bytes": 100 * MIB, "files": 100_000}

    def small(_path: object) -> os.statvfs_result:
        blocks, files = free["bytes"] // 4096, free["files"]
        return os.statvfs_result((4096, 4096, 65536, blocks, blocks, 10**6, files, files, 0, 255))

    monkeypatch.setattr(os, "statvfs", small)
    agent = make_agent(keep_free_ratio=0.1, keep_free_bytes=0)
    rank = make_dumping(agent.address, selection=selected("0-499"))
    rank.dump(0)
    (said,) = rank.view().findings
    assert said.startswith("job job: 499 more iterations need ")
    root = rank.rank.root
    assert f"on the disk of {root}, and 74.4 MiB are free above the floor (agent.keep" in said
    free["bytes"], free["files"] = 240 * MIB, 5000
    rank.wait_said("499 more iterations need 20,958 files and folders")
    free["files"] = 100_000
    rank.wait_said("")


def test_endless_plan_is_warned_about_below_ten_iterations(make_agent, make_dumping):
    """Nothing is reported while ten more iterations fit; below that, their number."""
    agent = make_agent(disk_bytes=6 * MIB)
    rank = make_dumping(agent.address, selection=selected("all"))
    rank.dump(0)
    assert rank.view().findings == ()
    rank.dump(1, elements=7000)
    (said,) = rank.view().findings
    assert said.startswith("job job: each iteration needs ")
    assert said.endswith("(agent.disk_bytes): 1 more fit")


def test_status_shows_size_and_disk_of_the_ledger(make_agent, make_dumping, short_dir):
    agent = make_agent()
    rank = make_dumping(agent.address)
    rank.dump(0)
    ledger = rank.view().ledger
    assert ledger.folder == str(short_dir / "state")
    sizes = [path.stat().st_size for path in (short_dir / "state").glob("ledger.sqlite*")]
    assert 0 < ledger.used_bytes <= sum(sizes)
    assert 0 < ledger.free_bytes <= ledger.total_bytes
