"""Jobs that communicate from Python, from C++ and from compiled regions: every collective and
message is in the order once with its members, as torch's own profiler counts them, and no loss
changes.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.scenario_jobs import run_scenarios

from rankdump._analysis.reader.coordinator_files import PublishedOrder
from rankdump._core.events import FindingKind
from rankdump._core.execution_order import OrderEntry
from rankdump.reader import read_order

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.torch]

TWO_RANKS = (
    "functional_calls",
    "functional_messages",
    "compiled",
    "ddp",
    "fsdp1_flat",
    "fsdp1_orig",
    "fsdp2",
    "fsdp2_bf16",
    "fsdp2_accumulation",
    "fsdp2_checkpointing",
    "tp",
    "tp_sp",
    "redistribute",
    "backend_calls",
)
FOUR_RANKS = ("hsdp", "fsdp2_tp", "pp_gpipe", "pp_1f1b", "pp_interleaved")
TWO_DIMENSIONS = {(0, 1), (2, 3), (0, 2), (1, 3)}
"""Groups of a mesh of two by two ranks."""

STEPS = 3
JOB = Path(__file__).with_name("collective_job.py")

KINDS = {
    "_allgather_base_": "ALL_GATHER",
    "_reduce_scatter_base_": "REDUCE_SCATTER",
    "allgather_": "ALL_GATHER",
    "allgather_into_tensor_coalesced_": "ALL_GATHER",
    "allreduce_": "ALL_REDUCE",
    "allreduce_coalesced_": "ALL_REDUCE",
    "alltoall_": "ALL_TO_ALL",
    "alltoall_base_": "ALL_TO_ALL",
    "barrier": "BARRIER",
    "broadcast_": "BROADCAST",
    "recv_": "RECV",
    "scatter_": "SCATTER",
    "reduce_scatter_tensor_coalesced_": "REDUCE_SCATTER",
    "send": "SEND",
}
"""Kinds of the operators of torch that the scenarios call."""

FUNCTIONAL_SIZES = [
    ("ALL_GATHER", 32),
    ("REDUCE_SCATTER", 64),
    ("ALL_REDUCE", 3),
    ("BROADCAST", 5),
    ("ALL_REDUCE", 6),
    ("ALL_TO_ALL", 0),
    ("ALL_TO_ALL", 0),
    ("ALL_GATHER", 32),
    ("REDUCE_SCATTER", 64),
]
"""Collectives of a step of the scenario, forward and backward, with the elements of a member."""


@dataclass
class CollectiveRun:
    """What the ranks of a scenario wrote, and the order in its tree."""

    name: str
    world: int
    reports: list[dict[str, Any]]
    order: PublishedOrder

    @property
    def calls(self) -> list[OrderEntry]:
        return [each for each in self.order.entries(graph=0) if each.kind.name != "OPERATOR"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_scenarios(JOB, tmp_path_factory.mktemp("collective"), {2: TWO_RANKS, 4: FOUR_RANKS})


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> Path:
    return folder / "2"


@pytest.fixture(scope="module")
def four_ranks(folder: Path) -> Path:
    return folder / "4"


def read_run(folder: Path, name: str, world: int) -> CollectiveRun:
    reports = [
        json.loads((folder / name / f"rank_{rank}.json").read_text()) for rank in range(world)
    ]
    return CollectiveRun(name, world, reports, read_order(folder / name / "tree"))


@pytest.fixture(params=[*((name, 2) for name in TWO_RANKS), *((name, 4) for name in FOUR_RANKS)])
def run(request: pytest.FixtureRequest) -> CollectiveRun:
    name, world = request.param
    folder: Path = request.getfixturevalue("two_ranks" if world == 2 else "four_ranks")
    return read_run(folder, name, world)


def test_losses_are_the_same_with_a_dump(run: CollectiveRun) -> None:
    for report in run.reports:
        assert len(report["plain"]) == STEPS
        assert report["dumped"] == report["plain"]


def test_every_collective_is_in_the_order_once(run: CollectiveRun) -> None:
    """For each rank, iteration and kind the order has as many as torch's profiler."""
    for rank, report in enumerate(run.reports):
        for iteration, counts in enumerate(report["counts"]):
            expected = Counter[str]()
            for operator, count in counts.items():
                expected[KINDS[operator.removeprefix("c10d::")]] += count
            entries = (each for each in run.calls if each.iteration == iteration)
            found = Counter(each.kind.name for each in entries if rank in each.ranks)
            assert found == expected, (rank, iteration)
            assert found


def test_every_collective_has_its_members(run: CollectiveRun) -> None:
    """Each collective has all members of its group, each message one rank."""
    everyone = tuple(range(run.world))
    groups = TWO_DIMENSIONS if run.name in ("hsdp", "fsdp2_tp") else {everyone}
    collectives = [each for each in run.calls if each.kind.is_collective]
    if collectives or not run.name.startswith(("pp", "functional_messages")):
        assert {each.ranks for each in collectives} == groups
    for each in run.calls:
        assert not each.missing
        assert each.group
        if not each.kind.is_collective:
            assert len(each.ranks) == 1
            assert each.peer not in (-1, *each.ranks)
    numbers = Counter(
        (each.group, each.sequence, each.ranks) for each in run.calls if each.kind.is_collective
    )
    assert set(numbers.values()) <= {1}


def test_every_message_has_its_other_end(run: CollectiveRun) -> None:
    """Sends and receives pair by group, sender, receiver and number, with equal sizes."""
    ends: dict[str, set[tuple[object, ...]]] = {"SEND": set(), "RECV": set()}
    for each in run.calls:
        if each.kind.name in ends:
            pair = (each.ranks[0], each.peer)
            pair = pair if each.kind.name == "SEND" else pair[::-1]
            ends[each.kind.name].add((each.group, pair, each.sequence, each.element_count))
    assert ends["SEND"] == ends["RECV"]
    if run.name.startswith(("pp", "functional_messages")):
        assert ends["SEND"]


def test_findings_name_only_what_was_not_seen(run: CollectiveRun) -> None:
    if run.name != "backend_calls":
        assert not run.order.findings
        return
    (finding,) = run.order.findings
    assert (finding.kind, finding.iteration) == (FindingKind.COLLECTIVES_NOT_SEEN, 1)
    assert (finding.ranks, finding.group) == ((0, 1), "0")
    assert finding.text == (
        "iteration 1: 2 collectives of group '0' on ranks 0-1 are not in the order: "
        "the script called the backend itself, past torch's operators"
    )


def test_run_ends_with_a_line_about_unseen_collectives(two_ranks: Path) -> None:
    lines = (two_ranks.parent / "log.txt").read_text().splitlines()
    said = [line for line in lines if "not in the execution order: 2 collectives" in line]
    assert any(line.startswith("ranks 0-1: ") for line in said)


def test_functional_collectives_have_sizes(two_ranks: Path) -> None:
    """The event of an asynchronous collective has the size and type that each member gave."""
    calls = read_run(two_ranks, "functional_calls", 2).calls
    for iteration in range(STEPS):
        # Calls that overlap are placed by their ends; their numbers are those of their begins.
        own = sorted((each.sequence, each) for each in calls if each.iteration == iteration)
        assert [(each.kind.name, each.element_count) for _, each in own] == FUNCTIONAL_SIZES
    assert {each.dtype for each in calls if each.element_count} == {"float32"}


def test_buckets_of_ddp_have_names(two_ranks: Path) -> None:
    calls = [each for each in read_run(two_ranks, "ddp", 2).calls if each.iteration == 2]
    reduced = sorted((each.sequence, each.name) for each in calls if "AllReduce" in each.name)
    assert [name.split("/")[2] for _, name in reduced] == [
        "bucket-0",
        "bucket-1",
        "bucket-2",
        "used-parameters",
    ]
