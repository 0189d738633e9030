"""Damaged rows of the ledger: only their session is rejected."""

from __future__ import annotations

import contextlib
import errno
import logging
import sqlite3
from pathlib import Path

import grpc
import numpy as np
import pytest
from support.slab_agents import wait_until

from rankdump._core.events import EventColumns, EventKind, RankEvent
from rankdump._core.manifest import Manifest
from rankdump._core.plan import ContentSettings
from rankdump._wire.metadata_messages import events_to_wire
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.ledger.agent_ledger import AgentLedger
from rankdumpd.agent.session.rank_session import RankSession

ARRAY = np.arange(12, dtype=np.float32)
BAD, GOOD = "bad-session", "good-session"
DAMAGES = {
    "a declaration": ("declarations", "body = x'ff'"),
    "a declaration that is empty": ("declarations", "body = x''"),
    "a declaration that is a text": ("declarations", "body = 'text'"),
    "a number": ("declarations", "sequence = 'x'"),
    "rows of figures": ("figures", "body = x'ff'"),
    "places of figures": ("figures", "refused = '{\"a'"),
    "reasons of figures": ("figures", "refused = '{\"a\": 5}'"),
    "a fate": ("figures", "fate = 'stowed'"),
    "an iteration": ("figures", "iteration = 'x'"),
    "an introduction": ("sessions", "request = substr(request, 2)"),
    "a rank": ("sessions", "request = json_set(request, '$.rank', 'x')"),
    "a job": ("sessions", "request = json_set(request, '$.job_id', 7)"),
    "a device": ("sessions", "request = json_set(request, '$.device_target', 7)"),
    "a plan": ("sessions", "plan = x'7b'"),
    "a root": ("sessions", "plan = CAST(json_set(CAST(plan AS TEXT), '$.output.root', 7) AS BLOB)"),
    "a state": ("sessions", "state = 'opem'"),
    "a watermark": ("sessions", "watermark = 'x'"),
    "a watermark below zero": ("sessions", "watermark = -5"),
    "notes": ("sessions", "notes = '[1'"),
    "graphs": ("sessions", "graphs = '[\"x\"]'"),
    "a secret": ("sessions", "secret_hash = 'x'"),
}


def events(sequence: int) -> agent_pb2.Frame:
    columns = EventColumns.from_events(
        [RankEvent(0, 0, 0, 0, "Default/op0", EventKind.OPERATOR, 1, 2)]
    )
    return agent_pb2.Frame(sequence=sequence, events=events_to_wire(columns))


@pytest.fixture
def left(make_agent, make_rank, frames):
    """An agent that stopped within the first iteration of two ranks, and these ranks."""
    agent = make_agent()
    content = ContentSettings("statistic", statistics=("max",))
    ranks = [
        make_rank(agent.address, rank=number, world_size=2, session_id=name, content=content)
        for number, name in enumerate((BAD, GOOD))
    ]
    for rank in ranks:
        rank.open()
        stream = rank.push().send(frames.figures(1, [(ARRAY, "11.0")]), events(2))
        stream.wait_acknowledged(2)
        stream.cut()
    agent.stop()
    return agent, ranks


def damage(folder: Path, table: str, change: str) -> None:
    with contextlib.closing(sqlite3.connect(folder / "state" / "ledger.sqlite")) as base, base:
        done = base.execute(f"UPDATE {table} SET {change} WHERE session_id = ?", (BAD,))
        assert done.rowcount == 1


def goes_on(rank, frames) -> None:
    """Let a rank come back, and end its iteration and its session."""
    assert rank.open().acknowledged_sequence == 2
    stream = rank.push().send(frames.end(3, 0, 1), frames.goodbye(4))
    stream.wait_acknowledged(4)
    assert stream.finish() is grpc.StatusCode.OK
    folder = rank.root / f"rank_{rank.rank}" / ".dump_metadata" / "manifest"
    (path,) = folder.glob("*.json")
    assert Manifest.from_json(path.read_bytes()).status.is_balanced


@pytest.mark.parametrize("what", DAMAGES)
def test_damaged_row_rejects_only_its_session(
    left, frames, make_rank, short_dir, caplog, what: str
):
    """The agent starts, reports once which session it rejects and why, and serves all others."""
    agent, (bad, good) = left
    damage(short_dir, *DAMAGES[what])
    with caplog.at_level(logging.ERROR):
        agent.start()
    said = [each for each in caplog.messages if "cannot be resumed" in each]
    assert len(said) == 1
    (finding,) = [each for each in good.status().findings if "cannot be resumed" in each]
    assert finding.startswith(f"session '{BAD}' cannot be resumed: ")
    assert finding.endswith("; its rank is rejected")
    with pytest.raises(grpc.RpcError) as refused:
        bad.open()
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "a new session is accepted" in str(refused.value.details())
    goes_on(good, frames)
    anew = make_rank(agent.address, rank=0, world_size=2, session_id="anew")
    anew.open()
    stream = anew.push().send(frames.record(1, ARRAY), frames.end(2, 0, 1), frames.goodbye(3))
    stream.wait_acknowledged(3)
    stream.cut()


def test_undecodable_host_name_is_shown_as_it_is(left, frames, short_dir):
    """Bytes that cannot be decoded are shown as the replacement character."""
    agent, (bad, good) = left
    damage(short_dir, "sessions", "request = CAST(replace(request, 'here', x'ff') AS TEXT)")
    agent.start()
    assert {each.host for each in good.status().sessions} == {"here", "\ufffd"}
    for rank in (bad, good):
        goes_on(rank, frames)


@pytest.mark.parametrize(
    ("whose", "name", "error"),
    [
        (AgentLedger, "find", sqlite3.OperationalError("disk I/O error")),
        (RankSession, "restore", OSError(errno.EIO, "a tree that does not answer")),
    ],
)
def test_transient_read_error_rejects_no_session(
    left, frames, monkeypatch, whose: type, name: str, error: Exception
):
    """Rows that could not be read at the start are read when their rank comes back."""
    agent, (bad, good) = left
    failing = [BAD]
    real = getattr(whose, name)

    def fails(self, *args, **more):
        asked = args[0] if isinstance(args[0], str) else self.request.session_id
        if asked in failing:
            raise error
        return real(self, *args, **more)

    monkeypatch.setattr(whose, name, fails)
    agent.start()
    failing.clear()
    for rank in (bad, good):
        goes_on(rank, frames)
    wait_until(lambda: not good.status().findings)
