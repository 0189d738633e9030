"""Real gloo jobs of two and three processes: collectives, messages, and gradient buckets."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.agent_double import RunningFakeAgent, bodies
from support.event_lists import list_events

import rankdump
from rankdump._core.events import OPEN_END_POSITION, EventKind, RankEvent
from rankdump._core.timeouts import GroupTimeout
from rankdump._wire.metadata_messages import events_from_wire

pytestmark = pytest.mark.slow

PACKAGE = str(Path(rankdump.__file__).parent)
PROGRAM = Path(__file__).parent / "rank.py"


def run(
    scenario: str,
    world: int,
    folder: Path,
    sockets: Path | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Run every rank of a scenario in a process of its own and return what each saw."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    command = [sys.executable, str(PROGRAM), scenario, str(world), str(folder)]
    command += [] if sockets is None else [str(sockets)]
    log = folder / "log"
    with (
        log.open("w") as file,
        subprocess.Popen(command, env=environment, stdout=file, stderr=file) as process,
    ):
        try:
            meanwhile()
            assert process.wait(timeout=500) == 0, log.read_text()
        finally:
            process.kill()
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(world)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run("collectives", 2, tmp_path_factory.mktemp("pair"))


KINDS = [
    ("ALL_REDUCE", 3),
    ("BROADCAST", 2),
    ("REDUCE", 2),
    ("ALL_GATHER", 2),
    ("ALL_GATHER", 2),
    ("REDUCE_SCATTER", 4),
    ("GATHER", 2),
    ("SCATTER", 2),
    ("ALL_TO_ALL", 0),
    ("ALL_TO_ALL", 0),
    ("BARRIER", 0),
    ("BARRIER", 0),
    ("ALL_GATHER", 1),  # the two halves of all_gather_object
    ("ALL_GATHER", 5),
]


def test_every_collective_is_an_event(pair) -> None:
    """Each kind is one event with its group, number and size, equal on all members.

    Its name has the number among events of its kind.
    """
    assert pair[0]["kinds"] == pair[1]["kinds"]
    before = Counter[str]()
    for number, (event, (kind, count)) in enumerate(zip(pair[0]["kinds"], KINDS, strict=True)):
        title = "".join(word.capitalize() for word in kind.split("_"))
        assert event[:5] == (kind, "0", (0, 1), number, count)
        assert event[6:] == (-1, f"Default/group-0/{title}-op{before[kind]}")
        before[kind] += 1
    assert [event[5] for event in pair[0]["kinds"][:2]] == ["float32", "int64"]


def test_every_message_is_an_event(pair) -> None:
    """Blocking, asynchronous, batched and from anyone: sender and receiver agree on numbers."""
    sent = [{e[3] for e in seen["messages"] if e[0] == "SEND"} for seen in pair]
    received = [{e[3] for e in seen["messages"] if e[0] == "RECV"} for seen in pair]
    assert sent == [{0, 1, 2, 3}, {0, 1, 2}]
    assert received == [{0, 1, 2}, {0, 1, 2, 3}]
    for rank, seen in enumerate(pair):
        assert {event[6] for event in seen["messages"]} == {1 - rank}
        assert len({event[7] for event in seen["messages"]}) == 7


def test_collectives_are_numbered_per_group(pair) -> None:
    """Numbers run per group, and a group's ranks are global."""
    for rank, seen in enumerate(pair):
        pairs = ("ALL_REDUCE", (0, 1))
        assert seen["groups"] == [(*pairs, 0), ("ALL_REDUCE", (rank,), 0), (*pairs, 1)]


def test_asynchronous_works_are_passed_through(pair) -> None:
    """The script gets torch's own work, freed with its last reference; its end is recorded."""
    for rank, seen in enumerate(pair):
        answer, followed, overlapped, dead, events = seen["async"]
        assert answer == ("Work", True, [2.0] * 4)
        assert followed == [4.0] * 4
        assert overlapped == 1
        assert dead
        assert [event[0] for event in events] == [
            "ALL_REDUCE",
            "ALL_REDUCE",
            "REDUCE_SCATTER",
            "SEND",
            "RECV",
            "BARRIER",
        ]
        assert events[3][6] == 1 - rank


def test_collective_numbers_continue_while_not_armed(pair) -> None:
    """A collective in an unarmed iteration is counted and not recorded."""
    for seen in pair:
        assert seen["unarmed"] == ([], 3)
        assert seen["threads"] == 51


def test_failing_collective_raises_as_without_us(pair) -> None:
    """The error is torch's own, and a call that torch rejects has no number."""
    for seen in pair:
        assert seen["failed"] == ("TypeError", 0)


def test_process_group_patch_is_shared_and_removed_with_the_last_model(pair) -> None:
    """Several models share one patch and one event per recorder; the last one restores torch."""
    for seen in pair:
        assert seen["told twice"] == len(KINDS)
        assert seen["still patched"]
        assert seen["restored"]
        assert seen["after detach"] == (2.0, [])
        assert seen["warnings"] == []


def test_collectives_that_raise_end_their_events(pair) -> None:
    """A collective that timed out is over, because no rank waits for it any more."""
    assert pair[0]["timed out"] == (["RuntimeError"] * 2, ["ALL_REDUCE", "RECV", "BARRIER"])
    assert pair[1]["timed out"] == ([], ["BARRIER"])
    assert [seen["open"] for seen in pair] == [[], []]


def test_timeouts_of_groups_in_use_are_recorded(pair) -> None:
    limits = pair[0]["limits"]
    assert limits["0"] == GroupTimeout("0", "gloo", 90_000_000)
    assert [each.timeout_us for each in limits.values()].count(500_000) == 1


def test_failing_collective_has_a_traceback_without_rankdump(tmp_path) -> None:
    """Its event has ended, and the traceback has the frames that it has without rankdump."""
    first, second = run("raising", 2, tmp_path)
    assert sorted(first["seen"]) == ["bucket", "called", "functional", "waited"]
    assert sorted(second["seen"]) == ["called", "functional"]
    assert (len(first["kinds"]), len(second["kinds"])) == (3, 1)
    for each in (first, second):
        assert set(each["kinds"]) == {"ALL_REDUCE"}
        for name, files in each["seen"].items():
            assert files == each["plain"][name], name
            assert not any(file.startswith(PACKAGE) for file in files)


def test_waiting_collective_is_sent_while_it_waits(tmp_path, socket_folder) -> None:
    """Rank 0 sends the all-reduce in which it hangs; rank 1 starts only after that arrived."""
    agents = [RunningFakeAgent(f"unix:{socket_folder}/{rank}.sock") for rank in (0, 1)]

    def told(rank: int) -> list[RankEvent]:
        batches = bodies(agents[rank], "events")
        found = [event for batch in batches for event in list_events(events_from_wire(batch))]
        return [event for event in found if event.kind is EventKind.ALL_REDUCE]

    def wait() -> None:
        deadline = time.monotonic() + 60
        while not told(0):
            assert time.monotonic() < deadline, "rank 0 told nothing"
            time.sleep(0.01)
        (waits,) = told(0)
        assert (waits.end_position, waits.sequence, waits.group) == (OPEN_END_POSITION, 0, "0")
        assert told(1) == []
        (socket_folder / "go").touch()

    run("waiting", 2, tmp_path, socket_folder, wait)
    for agent in agents:
        agent.stop()
    opened, complete = told(0)
    assert (complete.position, complete.sequence) == (opened.position, opened.sequence)
    assert complete.end_position == opened.position
    assert complete.end_us > complete.start_us == opened.start_us
    assert len(told(1)) == 1
    assert bodies(agents[0], "timeouts")[0].groups[0].timeout_us == 90_000_000


@pytest.fixture(scope="module", params=[2, 3])
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    return run("buckets", request.param, tmp_path_factory.mktemp("buckets"))


def test_bucket_hook_does_not_change_training(trained) -> None:
    """Parameters are bit-identical with and without us, in every use of the wrapper."""
    for seen in trained:
        assert [case for case, result in seen.items() if not result["same"]] == []
    assert len(trained[0]) == 14


def test_buckets_are_numbered_alike_on_all_ranks(trained) -> None:
    """Every rank has the same all-reduces under the same numbers, none twice."""
    for case, first in trained[0].items():
        collectives = [
            [event for event in seen[case]["events"] if event[0] == "ALL_REDUCE"]
            for seen in trained
        ]
        numbers = [event[3] for event in collectives[0]]
        assert len(numbers) == len(set(numbers))
        if case != "uneven":  # there a rank that is done shadows the others
            assert all(seen == collectives[0] for seen in collectives)
        assert numbers, (case, first)
        assert first["warnings"] == [], case


def test_bucket_names(trained) -> None:
    """DDP's own reduction names its bucket; a user's hook is recorded by its calls."""
    plain = [event[7] for event in trained[0]["plain"]["events"]]
    assert plain[0].startswith("Default/group-0/bucket-0/AllReduce-op")
    assert any("/bucket-1/" in name for name in plain)
    assert not any("/used-parameters/" in name for name in plain)
    for case in ("inner", "builtin before", "builtin after", "fp16 after"):
        assert any("/bucket-0/" in event[7] for event in trained[0][case]["events"]), case
    for case in ("hook before", "hook after", "hooks after"):
        assert not any("bucket" in event[7] for event in trained[0][case]["events"])
    unused = [event[7] for event in trained[0]["unused"]["events"]]
    assert sum("/used-parameters/" in name for name in unused) == 3
    halved = [event for event in trained[0]["fp16 after"]["events"] if event[0] == "ALL_REDUCE"]
    assert {event[5] for event in halved} == {"float16"}
    total = sum(e[4] for e in trained[0]["plain"]["events"] if e[0] == "ALL_REDUCE")
    assert total == 3 * 2499  # every gradient of three steps, once


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run("replays", 2, tmp_path_factory.mktemp("replayed"))


def test_noise_is_the_same_in_all_layouts(replayed: list[dict[str, Any]]) -> None:
    """The shards of an embedding move as the whole does, and all ranks have the same."""
    for rank in replayed:
        whole, moved = rank["moved"]["whole"], rank["moved"]
        for name in ("tp", "fsdp2"):
            assert torch.equal(moved[name][1], whole[1]), name
            torch.testing.assert_close(moved[name][0], whole[0])
    torch.manual_seed(0)
    plain = torch.nn.Embedding(8, 4)(torch.tensor([1, 7, 3, 0, 5, 2]))
    assert (replayed[0]["moved"]["whole"][1] != plain).all()


def test_replays_leave_a_job_as_it_is_and_name_the_operator_of_each_rank(
    replayed: list[dict[str, Any]],
) -> None:
    """Law: losses and collectives with DDP and FSDP2 are those of a job without replays; where one
    rank cannot make a second run, none does.
    """
    for rank in replayed:
        for kind in ("ddp", "fsdp2"):
            (losses, seen, _), (repeated, others, reports) = rank[kind]
            assert losses == repeated
            events = seen, others
            # DistributedDataParallel agrees on the order of its buckets in the second run it makes.
            names, again = ([(e[0], e[-1]) for e in each if e[0] != "BROADCAST"] for each in events)
            assert names
            assert names == again
            assert all("digests are the same" in each for each in reports), reports
    first, second = replayed
    assert "Noise-op0: its inputs agree, and output.0 differs" in second["noise"][0]
    assert "Noise-op0" not in first["noise"][0]
    assert "first Gradients/" in first["noise"][0]
    assert all("another rank cannot make a second run" in each for each in first["refused"])
    assert all("also has an object of type builtins.str" in each for each in second["refused"])
