"""Dumps of torch's Flight Recorder: two that torch wrote, and the order of made-up ones."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.foreign_dumps import write_dump

import rankdump
from rankdump._analysis.reader.call_order import RankCall, merge_calls
from rankdump._analysis.reader.flight_dumps import read_flight_dumps, read_flight_order
from rankdump._core.events import EventKind, FindingKind
from rankdump.errors import CorruptedError


def entry(number, operation="all_reduce", *, sequence=None, group="0", size=4, **other):
    """Return an entry as torch writes it."""
    return {
        "record_id": number,
        "process_group": (group, "default_pg"),
        "collective_seq_id": number + 1 if sequence is None else sequence,
        "p2p_seq_id": 0,
        "profiling_name": f"nccl:{operation}",
        "time_created_ns": 1_000_000 * (number + 1),
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "input_sizes": [[size]],
        "output_sizes": [[size]],
        "input_dtypes": ["Float"],
        "output_dtypes": ["Float"],
        "state": "completed",
        "retired": True,
        "is_p2p": False,
        **other,
    }


@pytest.fixture
def write(tmp_path):
    """Write the dump of a rank; a member of `default_pg` without one may be given."""

    def write_rank(rank, entries, *, members="[0, 1]", **other):
        config = {"0": {"name": "0", "desc": "default_pg", "ranks": members}}
        body = {
            "version": "2.10",
            "pg_config": config,
            "pg_status": {},
            "entries": entries,
            **other,
        }
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(body, 2))
        return tmp_path

    return write_rank


@pytest.mark.parametrize("name", ["flight", "flight-json"])
def test_dumps_of_torch_are_read(name, tmp_path):
    """The pickle and the JSON of one job say the same; rank 1 did not come to the last call."""
    root = write_dump(name, tmp_path)
    first, second = read_flight_dumps(root)
    assert [(call.name, call.sizes, call.dtype) for call in first.calls][3:] == [
        ("default_pg/Broadcast-op4", ((2, 4),), "float32"),
        ("group 1/AllReduce-op1", ((3,),), "int64"),
        ("default_pg/AllReduce-op5", ((5,),), "float32"),
    ]
    assert [call.state for call in second.calls] == ["completed"] * 5
    order = read_flight_order(root)
    assert [entry.ranks for entry in order.entries] == [(0, 1)] * 5 + [(0,)]
    (finding,) = order.findings
    assert (finding.kind, finding.ranks) == (FindingKind.MISSING_MEMBER, (1,))
    assert order.notes == ("not complete: default_pg/AllReduce-op5 is scheduled on rank 0",)


def test_source_is_the_line_of_the_program(tmp_path):
    dumps = read_flight_dumps(write_dump("flight", tmp_path))
    assert {call.source.rpartition(":")[0] for call in dumps[0].calls} == {
        "/home/me/training/job.py"
    }


def test_ring_that_lost_its_start_proves_no_absence(write):
    """A rank whose ring begins later may have called what it no longer has."""
    write(0, [entry(at) for at in range(4)])
    root = write(1, [entry(at) for at in range(2, 4)])
    order = read_flight_order(root)
    assert [entry.missing for entry in order.entries] == [()] * 4
    assert order.findings == []


def test_differences_between_members_are_findings(write):
    """Other operation, other size, other type; and a member that has no dump."""
    write(0, [entry(0), entry(1), entry(2)], members="[0, 1, 2]")
    root = write(
        1,
        [entry(0, "broadcast"), entry(1, size=5), entry(2, input_dtypes=["Half"])],
        members="[0, 1, 2]",
    )
    order = read_flight_order(root)
    assert [finding.kind for finding in order.findings] == [
        FindingKind.OPERATION_MISMATCH,
        FindingKind.SIZE_MISMATCH,
        FindingKind.DTYPE_MISMATCH,
        FindingKind.SILENT_RANK,
    ]
    assert "rank 2 has no dump" in order.findings[-1].text


def test_messages_without_the_other_end_are_named(write):
    message: dict[str, Any] = {"is_p2p": True, "p2p_seq_id": 1}
    write(0, [entry(0, "send 0->1", **message), entry(1, "send 0->1", is_p2p=True, p2p_seq_id=2)])
    order = read_flight_order(write(1, [entry(0, "recv 1<-0", **message)]))
    assert [(e.kind, e.ranks, e.peer) for e in order.entries][:2] == [
        (EventKind.SEND, (0,), 1),
        (EventKind.RECV, (1,), 0),
    ]
    (finding,) = order.findings
    assert (finding.kind, finding.sequence) == (FindingKind.LONE_MESSAGE, 2)


def test_groups_of_one_name_and_other_members_are_not_joined(tmp_path):
    """torch gives the halves of a split group the same name."""
    for rank in range(4):
        ranks = "[0, 1]" if rank < 2 else "[2, 3]"
        config = {"7": {"name": "7", "desc": "tp", "ranks": ranks}}
        entries = [entry(0, group="7", sequence=1)]
        body = {"version": "2.4", "pg_config": config, "entries": entries}
        (tmp_path / f"trace_{rank}").write_bytes(pickle.dumps(body, 2))
    order = read_flight_order(tmp_path)
    assert sorted(entry.ranks for entry in order.entries) == [(0, 1), (2, 3)]
    assert order.findings == []


@given(st.integers(0, 1 << 30), st.integers(1, 4), st.integers(0, 30))
def test_merged_order_keeps_the_order_of_each_rank(seed, ranks, length):
    """Law: whatever ranks call, every call is in one entry, in the order of its rank."""
    import random

    draw = random.Random(seed)
    programs = {}
    shared = [f"c{at}" for at in range(length)]
    for rank in range(ranks):
        calls = [
            RankCall(f"own{draw.random()}", start_us=draw.randrange(99)) for _ in range(length)
        ]
        joined = [RankCall(name, EventKind.ALL_REDUCE, name, members=tuple(range(ranks)))
                  for name in shared if draw.random() < 0.8]  # fmt: skip
        both = sorted([*enumerate(calls), *enumerate(joined)], key=lambda each: each[0])
        programs[rank] = [call for _, call in both]
    merged = merge_calls(programs, iteration=0)
    assert [entry.position for entry in merged.entries] == list(range(len(merged.entries)))
    for rank, calls in programs.items():
        own = [entry for entry in merged.entries if rank in entry.ranks]
        assert [entry.name for entry in own] == [call.name for call in calls]
    assert not any(finding.kind is FindingKind.CYCLE for finding in merged.findings)


def test_ranks_that_wait_in_a_circle_are_a_finding():
    """Each has called the collective of one group first, and the other's second."""
    one, other = (RankCall(n, EventKind.ALL_REDUCE, n, members=(0, 1)) for n in ("tp", "dp"))
    merged = merge_calls({0: [one, other], 1: [other, one]}, iteration=3)
    assert [finding.kind for finding in merged.findings] == [FindingKind.CYCLE]
    assert "rank 0 in tp, rank 1 in dp" in merged.findings[0].text
    assert {entry.name for entry in merged.entries} == {"tp", "dp"}


# -- hostile dumps


@pytest.mark.parametrize(
    ("body", "match"),
    [
        ({"version": "3.0", "pg_config": {}}, "a dump of version '3.0'; versions 2.x are read"),
        ({"version": "2.1", "pg_config": {}, "entries": 7}, "its entries are no list"),
        ({"version": "2.1", "pg_config": {}, "entries": [7]}, "entry 0 is not one of"),
        ({"version": "2.1", "pg_config": {}, "entries": [{"record_id": 1}]}, "entry 0 is not"),
        (
            {"version": "2.1", "pg_config": {}, "entries": [entry(0, input_sizes=[[-1]])]},
            "entry 0 is not one of the recorder",
        ),
        (
            {"version": "2.1", "pg_config": {}, "entries": [entry(0, time_created_ns=1 << 80)]},
            "entry 0 is not one of the recorder",
        ),
    ],
)
@pytest.mark.parametrize("as_json", [True, False])
def test_hostile_dump_is_one_line(body, match, as_json, tmp_path):
    packed = json.dumps(body).encode() if as_json else pickle.dumps(body, 2)
    path = tmp_path / "trace_0"
    path.write_bytes(packed)
    with pytest.raises(CorruptedError, match=match) as caught:
        read_flight_dumps(tmp_path)
    assert str(caught.value).startswith(f"{path}: ")


def test_pickle_with_an_object_is_one_line(tmp_path):
    path = tmp_path / "trace_0"
    path.write_bytes(pickle.dumps({"pg_config": json.JSONDecoder}, 2))
    with pytest.raises(
        CorruptedError, match=r"names json\.decoder\.JSONDecoder, which is not read"
    ):
        read_flight_dumps(tmp_path)


def test_truncated_dump_is_one_line(tmp_path):
    for name in ("flight", "flight-json"):
        root = write_dump(name, tmp_path)
        path = sorted(root.iterdir())[0]
        path.write_bytes(path.read_bytes()[:-9])
        with pytest.raises(CorruptedError, match=r"damaged at byte|no end|not a whole JSON file"):
            read_flight_dumps(root)


def test_it_is_no_tree_of_tensors(tmp_path):
    root = write_dump("flight", tmp_path)
    with pytest.raises(CorruptedError, match="has collectives but no tensors or statistics"):
        rankdump.open(root)
    (root / "trace_0").write_bytes((root / "nccl_trace_rank_0").read_bytes())
    with pytest.raises(CorruptedError, match="are both of rank 0"):
        read_flight_order(root)
