"""Migration of sessions to their workers, with rows and slabs, despite crashes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.black_box_rings import make_frozen_rings

from rankdump._core.session_protocol import SessionRequest
from rankdump.errors import ConfigError, UnavailableError
from rankdumpd.agent.blackbox.raw_freeze import RawFreezeFolder
from rankdumpd.agent.ledger.agent_ledger import AgentLedger
from rankdumpd.agent.ledger.database import lock_ledger_folder
from rankdumpd.workers import session_migration
from rankdumpd.workers.session_migration import StatePaths, migrate_sessions, select_worker

RANKS = range(6)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[StatePaths]:
    home = StatePaths(tmp_path / "state", tmp_path / "run")
    guard = lock_ledger_folder(home.state_dir)
    yield home
    os.close(guard)


def request(rank: int) -> SessionRequest:
    return SessionRequest(
        job_id="job",
        session_id=f"s{rank}",
        rank=rank,
        world_size=len(RANKS),
        device=0,
        host="here",
        pid=1,
        framework="",
        device_target="CPU",
        plan_json=b"plan",
        config_source=b"",
    )


def fill(home: StatePaths, ranks=RANKS) -> None:
    """Write the state of a killed agent: unfinished sessions and their slabs."""
    # Elsewhere first: the lock of the folder itself is held by whoever calls.
    ledger = AgentLedger(home.state_dir / "making")
    for rank in ranks:
        ledger.open_session(request(rank))
    ledger.close()
    (home.state_dir / "making" / "ledger.sqlite").rename(home.ledger)
    with contextlib.closing(sqlite3.connect(home.ledger)) as base, base:
        base.executemany(
            "INSERT INTO declarations (session_id, sequence, kind, body, applied)"
            " VALUES (?, 1, 'IterationEnd', ?, 0)",
            [(f"s{rank}", b"body%d" % rank) for rank in ranks],
        )
    for rank in ranks:
        assert home.slabs is not None
        home.slabs.mkdir(parents=True, exist_ok=True)
        (home.slabs / f"s{rank}.slab").write_bytes(b"slab%d" % rank)


def log_of(home: StatePaths) -> list[tuple[int, str, int]]:
    """Return the unreported items: numbers, sessions and frames."""
    if not home.ledger.exists():
        return []
    with contextlib.closing(sqlite3.connect(home.ledger)) as base:
        query = "SELECT number, session_id, sequence FROM log ORDER BY number"
        return base.execute(query).fetchall()


def fill_log(home: StatePaths, items: list[tuple[str, int]]) -> None:
    with contextlib.closing(sqlite3.connect(home.ledger)) as base, base:
        base.executemany(
            "INSERT INTO log (session_id, sequence, kind, events, bytes, body)"
            " VALUES (?, ?, 'events', 1, 1, x'')",
            items,
        )


def found(home: StatePaths) -> set[int]:
    """Return the ranks with all of their rows here, and no others."""
    if not home.ledger.exists():
        return set()
    with contextlib.closing(sqlite3.connect(home.ledger)) as base:
        sessions = {s for (s,) in base.execute("SELECT session_id FROM sessions")}
        bodies = dict(base.execute("SELECT session_id, body FROM declarations"))
    ranks = {int(s[1:]) for s in sessions}
    assert bodies == {f"s{rank}": b"body%d" % rank for rank in ranks}
    return ranks


def check(agent: StatePaths, workers: int) -> None:
    """Fail unless every row is at its worker, once."""
    for index in range(8):
        home = agent.worker_paths(index)
        law = {rank for rank in RANKS if select_worker("job", rank, workers) == index}
        assert found(home) == (law if workers > 1 and index < workers else set())
    assert found(agent) == (set(RANKS) if workers == 1 else set())
    for rank in RANKS:
        home = agent if workers == 1 else agent.worker_paths(select_worker("job", rank, workers))
        assert home.slabs is not None
        assert (home.slabs / f"s{rank}.slab").read_bytes() == b"slab%d" % rank
    assert len(list((agent.state_dir.parent / "run").rglob("*.slab"))) == len(RANKS)


def move(agent: StatePaths, workers: int) -> None:
    migrate_sessions(agent, workers, group=-1, patience_s=0)


@pytest.mark.slow
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(numbers=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_migration_moves_sessions_between_any_numbers_of_workers(
    tmp_path_factory, numbers: list[int]
):
    """Law: every session is whole at its selected worker."""
    folder = tmp_path_factory.mktemp("agent")
    agent = StatePaths(folder / "state", folder / "run")
    guard = lock_ledger_folder(agent.state_dir)
    fill(agent)
    for workers in numbers:
        move(agent, workers)
        check(agent, workers)
    os.close(guard)


@pytest.mark.parametrize("crash", ["_move_rows", "_delete_rows", "_move_slabs"])
def test_migration_continues_after_crash(agent: StatePaths, monkeypatch, crash):
    """The next start may have another number of workers."""
    fill(agent)
    with monkeypatch.context() as patch:
        patch.setattr(session_migration, crash, _die)
        with pytest.raises(KeyboardInterrupt):
            move(agent, 2)
    move(agent, 3)
    check(agent, 3)
    move(agent, 1)
    check(agent, 1)


def _die(*_arguments: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("crash", ["", "_delete_rows"])
def test_migration_renumbers_unreported_items_in_order(agent: StatePaths, monkeypatch, crash):
    """Numbers may be in use in the new log, so each item gets a new one, once."""
    fill(agent)
    fill_log(agent, [(f"s{rank}", number) for number in (3, 1, 2) for rank in RANKS])
    if crash:
        with monkeypatch.context() as patch:
            patch.setattr(session_migration, crash, _die)
            with pytest.raises(KeyboardInterrupt):
                move(agent, 2)
    for workers in (2, 3, 1):
        move(agent, workers)
        places = (
            [agent] if workers == 1 else [agent.worker_paths(index) for index in range(workers)]
        )
        logs = [log_of(home) for home in places]
        assert sum(map(len, logs)) == 3 * len(RANKS)
        for rank in RANKS:
            (mine,) = filter(None, ([i for i in log if i[1] == f"s{rank}"] for log in logs))
            assert [sequence for _, _, sequence in mine] == [3, 1, 2]
    assert min(number for number, _, _ in log_of(agent)) > 3 * len(RANKS)


def test_migrated_session_keeps_its_secret(agent: StatePaths):
    """The rank that opened it can resume it at any worker."""
    ledger = AgentLedger(agent.state_dir / "making")
    ledger.open_session(dataclasses.replace(request(0), secret=b"digest"))
    ledger.close()
    (agent.state_dir / "making" / "ledger.sqlite").rename(agent.ledger)
    move(agent, 3)
    at = AgentLedger(agent.worker_paths(select_worker("job", 0, 3)).state_dir)
    row = at.find("s0")
    at.close()
    assert row is not None
    assert row.request.secret == b"digest"


def test_migration_without_sessions_creates_no_tables(agent: StatePaths):
    move(agent, 2)
    assert not agent.worker_paths(0).ledger.exists()
    assert not (agent.state_dir.parent / "run").exists()


def test_migration_fails_while_worker_runs(agent: StatePaths):
    guard = lock_ledger_folder(agent.worker_paths(1).state_dir)
    with pytest.raises(UnavailableError, match="used by another agent"):
        move(agent, 2)
    os.close(guard)
    move(agent, 2)


def test_migration_skips_unreadable_session(agent: StatePaths):
    fill(agent)
    with contextlib.closing(sqlite3.connect(agent.ledger)) as base, base:
        base.execute("UPDATE sessions SET request = ? WHERE session_id = 's0'", (json.dumps([]),))
    move(agent, 2)
    assert {r for index in range(2) for r in found(agent.worker_paths(index))} == set(RANKS) - {0}


def test_failed_migration_is_one_error_line(agent: StatePaths):
    """An agent without its sessions must not start."""
    fill(agent)
    agent.worker_paths(0).ledger.mkdir(parents=True)
    with pytest.raises(ConfigError) as refused:
        move(agent, 2)
    assert "\n" not in str(refused.value)
    assert found(agent) | found(agent.worker_paths(1)) == set(RANKS)


def pins_of(home: StatePaths) -> set[str]:
    with contextlib.closing(sqlite3.connect(home.ledger)) as base:
        return {job_id for (job_id,) in base.execute("SELECT job_id FROM pins")}


def test_migration_copies_pins_to_all_workers(agent: StatePaths):
    """Removed pins do not come back from former workers."""
    fill(agent)
    with contextlib.closing(sqlite3.connect(agent.ledger)) as base, base:
        base.execute("INSERT INTO pins VALUES ('job', 1)")
    migrate_sessions(agent, 2, group=-1, patience_s=0)
    assert [pins_of(agent.worker_paths(index)) for index in range(2)] == [{"job"}, {"job"}]
    assert pins_of(agent) == set()
    for index in range(2):
        with contextlib.closing(sqlite3.connect(agent.worker_paths(index).ledger)) as base, base:
            base.execute("DELETE FROM pins")
    migrate_sessions(agent, 1, group=-1, patience_s=0)
    assert pins_of(agent) == set()


def test_migration_moves_freezes_of_former_workers(agent: StatePaths, tmp_path: Path):
    former, kept = agent.worker_paths(2), agent.worker_paths(0)
    for home in (former, kept, agent):
        # All of one job, and frozen in the same microsecond.
        RawFreezeFolder(home.state_dir).write(*make_frozen_rings(tmp_path, ranks=1))
    move(agent, 2)
    # The former worker's and the agent's own, beside the one that was there.
    assert len(RawFreezeFolder(kept.state_dir).list_files()) == 3
    assert RawFreezeFolder(agent.state_dir).list_files() == []
    move(agent, 1)
    assert len(RawFreezeFolder(agent.state_dir).list_files()) == 3
