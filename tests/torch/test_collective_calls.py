"""How far a rank has come in the collectives of its groups, recorded or not."""

from __future__ import annotations

import itertools
import time

from rankdump._core.black_box import MAX_GROUP_CALLS
from rankdump._core.events import EventKind, ProcessGroup
from rankdump._frameworks.torch import communication
from rankdump._frameworks.torch.collective_tensors import CollectiveOperands
from rankdump._frameworks.torch.communication import CollectiveRecorder, CollectiveRequest

WORLD, HALF = ProcessGroup("world", (0, 1, 2, 3)), ProcessGroup("half", (0, 1))


def test_calls_are_counted_in_each_group_whether_they_are_recorded_or_not():
    before_us = time.time_ns() // 1000
    recorder = CollectiveRecorder()
    assert recorder.list_calls(members=True) == ()
    recorder.count_collective(WORLD, EventKind.BROADCAST)
    recorder.count_collective(HALF, EventKind.BARRIER)
    request = CollectiveRequest(EventKind.ALL_REDUCE, WORLD, rank=0)
    recorder.begin(request, CollectiveOperands)
    latest, earlier = recorder.list_calls(members=True)
    assert (latest.group, latest.ranks, latest.count) == ("world", (0, 1, 2, 3), 2)
    assert latest.kind == "all_reduce"
    assert (earlier.group, earlier.count, earlier.kind) == ("half", 1, "barrier")
    assert before_us <= earlier.called_us <= latest.called_us <= time.time_ns() // 1000
    assert [each.ranks for each in recorder.list_calls(members=False)] == [(), ()]


def test_groups_used_last_are_listed_where_there_are_many(monkeypatch):
    moments_ns = itertools.count(1, 1000)
    monkeypatch.setattr(communication.time, "time_ns", lambda: next(moments_ns))
    recorder = CollectiveRecorder()
    for number in range(MAX_GROUP_CALLS + 9):
        recorder.count_collective(ProcessGroup(f"g{number}", (0,)), EventKind.ALL_REDUCE)
    listed = recorder.list_calls(members=True)
    assert len(listed) == MAX_GROUP_CALLS
    assert listed[0].group == f"g{MAX_GROUP_CALLS + 8}"
