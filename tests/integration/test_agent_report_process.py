"""Reports of agents that are processes: killed, moved between workers, with warnings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.slab_agents import wait_until
from support.stub_coordinator import StubCoordinator
from support.worker_host import WAIT_S, WorkerHost

from rankdump._core.events import EventColumns, EventKind, RankEvent
from rankdump._core.manifest import Manifest
from rankdump._core.session_protocol import IterationEnd, SessionEnd
from rankdump._transport.agent_client import resolve_redirect
from rankdump._wire.frames import make_metadata_frame
from rankdumpd.workers.session_migration import select_worker

BATCH = 50


@pytest.fixture
def coordinator(short_dir: Path) -> Iterator[StubCoordinator]:
    coordinator = StubCoordinator(short_dir)
    coordinator.start()
    yield coordinator
    coordinator.stop()


@pytest.fixture
def make_host(short_dir: Path, coordinator: StubCoordinator) -> Iterator[Callable[..., WorkerHost]]:
    with contextlib.ExitStack() as stack:

        def make(workers: int, **settings: str) -> WorkerHost:
            host = WorkerHost(short_dir, workers, COORDINATOR=coordinator.address, **settings)
            stack.callback(host.close)
            return host

        yield make


def frames(first: int, turns: int) -> list:
    """Return the frames of some turns: a batch of events, and the end of its iteration."""
    found = []
    for turn in range(first, first + turns):
        places = range(BATCH * turn, BATCH * (turn + 1))
        columns = EventColumns.from_events(
            [RankEvent(0, turn, n, n, f"op{n}", EventKind.OPERATOR, n, n + 1) for n in places]
        )
        end = IterationEnd(
            turn, 0, stall_us=turn, first_position=places[0], last_position=places[-1]
        )
        found.append(make_metadata_frame(2 * turn + 1, columns))
        found.append(make_metadata_frame(2 * turn + 2, end))
    return found


def everything(turns: int) -> list[int]:
    return list(range(BATCH * turns))


@pytest.mark.parametrize("forgets", [False, True])
def test_agent_killed_before_acknowledgement_resends_all(
    make_host, coordinator, make_rank, forgets
):
    """Law: every event arrives, under numbers that continue, from an agent of the same name."""
    host = make_host(1)
    rank = make_rank(host.address, wants_slab=False)
    rank.open()
    coordinator.silent = True
    stream = rank.push().send(*frames(0, 10))
    stream.wait_acknowledged(20)
    coordinator.wait(lambda: coordinator.received)
    host.kill_all()
    stream.wait_over()
    coordinator.stop()
    coordinator.silent = False
    (before,) = coordinator.received.items()
    if forgets:
        coordinator.forget()
    coordinator.start()
    host.start(1)
    again = make_rank(host.address)
    again.open()
    stream = again.push().send(*frames(10, 5))
    stream.wait_acknowledged(30)
    coordinator.wait(lambda: len(coordinator.positions("session0000")) >= 15 * BATCH)
    assert coordinator.positions("session0000") == everything(15)
    ((agent_id, received),) = coordinator.received.items()
    assert agent_id == before[0]
    assert received > before[1]
    balances = {i.iteration: i for r in coordinator.reports for i in r.iterations}
    coordinator.wait(
        lambda: {i.iteration for r in coordinator.reports for i in r.iterations} == {*range(15)}
    )
    assert (balances[3].stall_us, balances[3].first_position) == (3, 3 * BATCH)
    manifests = [Manifest.from_json(p.read_bytes()) for p in rank.root.rglob("iteration_3.*.json")]
    assert [(m.status.stall_us, m.status.last_position) for m in manifests] == [(3, 4 * BATCH - 1)]
    stream.cut()


def test_sessions_move_between_workers_with_their_unsent_reports(make_host, coordinator, make_rank):
    """Each worker has a name and a log; another number of workers loses nothing of either."""
    host = make_host(2)
    coordinator.holds_back = True
    ranks = range(4)
    for number in ranks:
        own = f"{host.address}.{select_worker('job', number, 2)}"
        rank = make_rank(own, rank=number, world_size=4, session_id=f"s{number}")
        rank.open()
        stream = rank.push().send(*frames(0, 4))
        stream.wait_acknowledged(8)
        stream.cut()
    for number in ranks:
        coordinator.wait(lambda n=number: len(coordinator.positions(f"s{n}")) >= 4 * BATCH)
        assert coordinator.positions(f"s{number}") == everything(4)
    names = set(coordinator.received)
    assert len(names) == 2
    host.kill_all()
    coordinator.forget()
    coordinator.holds_back = False
    host.start(3)
    for number in ranks:
        coordinator.wait(lambda n=number: len(coordinator.positions(f"s{n}")) >= 4 * BATCH)
        assert coordinator.positions(f"s{number}") == everything(4)
    told = {i.rank for r in coordinator.reports for i in r.iterations}
    coordinator.wait(lambda: {s.rank for r in coordinator.reports for s in r.sessions} == {*ranks})
    assert told == {*ranks}


def test_warning_reaches_present_and_later_ranks_of_its_job(make_host, coordinator, make_rank):
    """What the coordinator repeats goes out on each stream once."""
    coordinator.warnings = [("job", "half of it is used"), ("other", "not this one")]
    host = make_host(1)
    first = make_rank(host.address, world_size=2, wants_slab=False)
    first.open()
    stream = first.push()
    stream.wait_warned()
    later = make_rank(host.address, rank=1, world_size=2, session_id="later", wants_slab=False)
    later.open()
    second = later.push()
    second.wait_warned()
    for each in (stream, second):
        each.send(make_metadata_frame(1, SessionEnd(1))).wait_acknowledged(1)
        each.finish()
        assert each.warnings == ["half of it is used"]
    assert host.process.poll() is None, host.log()
    host.process.terminate()
    assert host.process.wait(WAIT_S) == 0, host.log()


@pytest.mark.parametrize("workers", [1, 2])
def test_stop_does_not_wait_for_an_absent_coordinator(make_host, coordinator, make_rank, workers):
    """Status and stop report undelivered items; the next agent sends them."""
    coordinator.stop()
    # Longer than the patience of this test.
    host = make_host(workers, DRAIN_TIMEOUT_S="600")
    redirect = make_rank(host.address).open().redirect
    rank = make_rank(resolve_redirect(host.address, redirect) if redirect else host.address)
    rank.open()
    stream = rank.push().send(*frames(0, 5), make_metadata_frame(11, SessionEnd(5)))
    stream.wait_acknowledged(11)
    stream.finish()
    said = f"coordinator {coordinator.address} has been unreachable since 20"
    wait_until(lambda: any(each.startswith(said) for each in host.view().findings))
    assert host.stop() == 0
    assert "; they stay in " in host.log()
    assert "sent again" not in host.log()
    coordinator.start()
    host.start(workers)
    coordinator.wait(lambda: coordinator.positions("session0000") == everything(5))
