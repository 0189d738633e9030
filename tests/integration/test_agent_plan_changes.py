"""An agent whose sessions change their plans: every frame is judged by the plan before it, also
when the agent is killed in between.
"""

from __future__ import annotations

from pathlib import Path

import grpc
import numpy as np
import pytest

from rankdump._core.job_control import PlanChange
from rankdump._core.manifest import Manifest
from rankdump._core.plan import (
    DumpPlan,
    IterationSelection,
    OutputSettings,
    TensorSelection,
    plan_from_json,
    plan_to_json,
)
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.commit.post_commit import PostCommitActions
from rankdumpd.agent.session.rank_session import RankSession

ARRAY = np.arange(10, dtype="f4")
ONLY = TensorSelection(iterations=IterationSelection("0", ((0, 0),)))


def changed(sequence: int, plan: DumpPlan, iteration: int = 1) -> agent_pb2.Frame:
    body = agent_pb2.ChangedPlan(iteration=iteration, plan_json=plan_to_json(plan))
    return agent_pb2.Frame(sequence=sequence, changed_plan=body)


def manifest_of(root: Path, iteration: int) -> Manifest:
    folder = root / "rank_0" / ".dump_metadata" / "manifest"
    (path,) = folder.glob(f"iteration_{iteration}.*.json")
    return Manifest.from_json(path.read_bytes())


@pytest.fixture
def sent(short_dir: Path, frames) -> list[agent_pb2.Frame]:
    """Frames of three iterations: the configured plan, one with statistics too, and one without
    elements.
    """
    before = DumpPlan(OutputSettings(root=str(short_dir / "dump")), ONLY)
    full = PlanChange(IterationSelection(), saved="full").apply_to(before)
    rows = PlanChange(saved="statistic").apply_to(full)
    return [
        frames.record(1, ARRAY),
        frames.record(2, ARRAY, iteration=1),  # not selected by the first plan
        frames.end(3, 0, 1),
        changed(4, full),
        frames.record(5, ARRAY, iteration=1),
        frames.end(6, 1, 2),
        changed(7, rows, 2),
        frames.figures(8, [(ARRAY, "9,0,16.8819")], iteration=2),
        frames.record(9, ARRAY, iteration=2),  # elements are not kept any more
        frames.end(10, 2, 2),
        frames.goodbye(11),
    ]


def check_tree(root: Path) -> None:
    status = [manifest_of(root, each).status for each in range(3)]
    assert [each.is_balanced for each in status] == [True] * 3
    assert [dict(each.dropped) for each in status] == [
        {},
        {"iteration_excluded": 1},
        {"no_statistics": 1},
    ]
    folders = [root / "rank_0" / "Net" / "0" / str(each) for each in range(3)]
    assert [len(list(each.glob("*.npy*"))) for each in folders] == [1, 1, 0]
    tables = [each / "statistic.csv" for each in folders]
    assert [each.exists() for each in tables] == [False, True, True]
    assert [len(each.read_text().splitlines()) for each in tables[1:]] == [2, 2]


def test_frames_are_judged_by_the_plan_before_them(make_agent, make_rank, sent):
    rank = make_rank(make_agent().address, selection=ONLY)
    assert rank.open().changes_plans
    stream = rank.push().send(*sent[:-1])
    stream.wait_acknowledged(10)
    (session,) = rank.status().sessions
    assert (session.selected, session.operators, session.saved_data) == ("all", "all", "statistic")
    assert session.changed_in == 2
    assert stream.send(sent[-1]).finish() is grpc.StatusCode.OK
    check_tree(rank.root)


def test_iteration_before_a_plan_with_tables_has_its_manifest(
    make_agent, make_rank, sent, monkeypatch
):
    """The plan arrives while the end of the iteration before it is being applied."""
    tabulate, plan = PostCommitActions._tabulate, plan_from_json(sent[3].changed_plan.plan_json)

    def tabulate_first(self: PostCommitActions, session: RankSession) -> None:
        tabulate(self, session)
        if session.watermark >= 3:
            session.plans.add(4, plan, 1)

    monkeypatch.setattr(PostCommitActions, "_tabulate", tabulate_first)
    rank = make_rank(make_agent().address, selection=ONLY)
    rank.open()
    stream = rank.push().send(*sent[:3])
    stream.wait_acknowledged(3)
    assert stream.send(*sent[3:]).finish() is grpc.StatusCode.OK
    check_tree(rank.root)


@pytest.mark.parametrize("first", [3, 4, 5, 7, 8])
def test_plans_survive_a_restart(make_agent, make_rank, sent, first):
    """Whatever of it was committed: the rest is judged by the plan that it was made for."""
    agent = make_agent()
    rank = make_rank(agent.address, selection=ONLY)
    rank.open()
    stream = rank.push().send(*sent[:first])
    stream.wait_acknowledged(first)
    agent.restart()
    stream.wait_over()
    rank.open()
    assert rank.push().send(*sent).finish() is grpc.StatusCode.OK
    check_tree(rank.root)


def test_killed_agent_judges_by_the_changed_plan(make_daemon, make_rank, sent):
    daemon = make_daemon()
    rank = make_rank(daemon.address, selection=ONLY)
    rank.open()
    stream = rank.push().send(*sent[:4])
    stream.wait_acknowledged(4)
    daemon.kill()
    stream.wait_over()
    daemon.start()
    assert rank.open().acknowledged_sequence == 4
    (session,) = rank.status().sessions
    assert (session.selected, session.saved_data, session.changed_in) == ("all", "full", 1)
    assert rank.push().send(*sent[4:]).finish() is grpc.StatusCode.OK
    check_tree(rank.root)


def test_plan_of_another_tree_is_not_taken(make_agent, make_rank, frames, short_dir):
    rank = make_rank(make_agent().address, selection=ONLY)
    rank.open()
    elsewhere = changed(2, DumpPlan(OutputSettings(root=str(short_dir / "other")), ONLY))
    for _ in range(2):
        stream = rank.push().send(frames.record(1, ARRAY), elsewhere)
        assert stream.wait_over() is grpc.StatusCode.UNAVAILABLE
    stream = rank.push().send(frames.record(1, ARRAY), elsewhere, frames.end(3, 0, 1))
    stream.wait_acknowledged(3)
    assert manifest_of(rank.root, 0).status.is_balanced
    assert not (short_dir / "other").exists()
    assert any("for good" in each for each in rank.status().findings)
    stream.finish()
