"""One run: deployment, schedule, end, verdict."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from faults import frozen_trees, observation, published_order, table_rows
from faults.deployment import MIB, FaultDeployment, make_deployment
from faults.descriptor_limit import open_descriptors, resident_bytes
from faults.laws import unplaced
from faults.memory_monitor import MemoryMonitor
from faults.oracle import breaches, drops
from faults.schedule_player import LOOK_S, SchedulePlayer
from faults.tree_watcher import TreeWatcher
from faults.values import PlacedOperator, RunObservation, RunVerdict, ScheduledFault

from rankdump._cli.daemon_client import drain_agent, fetch_agent_status
from rankdump._core.status import SessionState
from rankdump._embedded_daemon import is_daemon_serving
from rankdump.errors import RankdumpError

_PATIENCE_S = 60.0
_RETRIED = "the ledger keeps it and it is retried"
"""End of the findings about manifests and tables that could not be written yet."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Parameters of a run."""

    seed: int
    seconds: float
    faults: Sequence[ScheduledFault]
    small: bool
    pause_s: float
    folder: Path


@dataclass(slots=True)
class RunEnding:
    """State of all processes at the end, and the coordinator's view of it."""

    complaints: list[str]
    balances: dict[tuple[str, int], tuple[int, int, int]]
    late: Mapping[tuple[int, int], int]
    sizes: dict[str, Any]


def run(order: RunRequest, say: Callable[[str], None]) -> RunVerdict:
    """Return the verdict over one run, which is made in a mount namespace of its own."""
    deployment = make_deployment(order.folder, small=order.small, pause_s=order.pause_s)
    for process in (*deployment.agents, deployment.coordinator):
        for disk in process.disks:
            disk.mount()
    watcher = TreeWatcher([agent.tree / "dump" for agent in deployment.agents], order.seed)
    monitor = MemoryMonitor(deployment)
    player = SchedulePlayer(deployment, order.faults, say=say)
    begun_s = time.monotonic()
    try:
        _begin(deployment)
        player.play(order.seconds)
        played_s = time.monotonic() - begun_s
        ending = _finish(deployment, player, monitor, say)
    finally:
        monitor.close()
        watcher.close()
        deployment.close()
    say("reading what is left")
    happened = dict(player.happened)
    ending.complaints += _check_frozen(order, deployment, player, ending)
    seen = _seen(order, deployment, ending, watcher, monitor)
    return RunVerdict(
        order.seed,
        round(played_s, 1),
        happened,
        dict(player.missed),
        _figures(seen, deployment, player, watcher) | ending.sizes,
        breaches(seen, happened),
    )


def _check_frozen(
    order: RunRequest, deployment: FaultDeployment, player: SchedulePlayer, ending: RunEnding
) -> Iterator[str]:
    roots = [agent.tree / "dump" for agent in deployment.agents]
    raw = frozen_trees.list_raw_files(agent.state for agent in deployment.agents)
    ending.sizes["frozen_trees"] = sum(len(frozen_trees.list_trees(root)) for root in roots)
    yield from (f"{path} is in no frozen tree" for path in raw)
    lives = observation.lives(order.folder)
    yield from frozen_trees.check_frozen_trees(roots, lives, player.frozen)


def _seen(
    order: RunRequest,
    deployment: FaultDeployment,
    ending: RunEnding,
    watcher: TreeWatcher,
    monitor: MemoryMonitor,
) -> RunObservation:
    """Return all that there is to see."""
    states = [agent.state for agent in deployment.agents]
    roots = [agent.tree / "dump" for agent in deployment.agents]
    complaints = ending.complaints + watcher.complaints
    placed: Counter[PlacedOperator] = Counter()
    for agent, root in zip(deployment.agents, roots, strict=True):
        found, unread = published_order.published(root, agent.job_id)
        placed.update(found)
        complaints += unread
    ranks = {life.session_id: life.rank for life in observation.lives(order.folder)}
    waiting = table_rows.find_waiting(states, ranks)
    ending.sizes["manifests_that_wait_for_the_table"] = len(waiting)
    for root in filter(Path.is_dir, roots):
        complaints += table_rows.check_table(root, waiting)
    seen = observation.seen(order.folder, states, roots, ending.balances, complaints)
    return replace(seen, placed=placed, late=ending.late, growths=monitor.growths())


def _begin(deployment: FaultDeployment) -> None:
    """Start all processes; return when every rank has an acknowledgement."""
    for process in (deployment.coordinator, *deployment.agents):
        process.start()
    until_s = time.monotonic() + _PATIENCE_S
    while not all(
        is_daemon_serving(process.address)
        for process in (deployment.coordinator, *deployment.agents)
    ):
        assert time.monotonic() < until_s, "the daemons do not come up"
    for rank in deployment.ranks:
        rank.start()
    while not all(rank.up for rank in deployment.ranks):
        assert time.monotonic() < until_s, "the ranks do not come up"
        time.sleep(LOOK_S)


def _finish(
    deployment: FaultDeployment,
    player: SchedulePlayer,
    monitor: MemoryMonitor,
    say: Callable[[str], None],
) -> RunEnding:
    """Let everybody end well; return what did not, and what the coordinator knew."""
    ending = RunEnding(list(player.ends), {}, {}, {})
    for process in deployment.processes:
        process.control.heal()
    for proxy in deployment.proxies:
        proxy.hole(False)
        proxy.delay(0)
    say("healed; ranks say goodbye")
    _all_live(deployment, player)
    for rank in deployment.ranks:
        rank.wanted = False
        rank.kill(signal.SIGUSR1)
    for rank in deployment.ranks:
        code = rank.end(_PATIENCE_S)
        if code != 0:
            ending.complaints.append(f"rank {rank.role.rank} ended with {code}")
    ending.complaints += [*_not_well(deployment), *_retried(deployment), *_drained(deployment)]
    _hear(deployment.coordinator.address, ending)
    ending.sizes = _sizes(deployment)
    monitor.close()
    say("daemons stop")
    ending.complaints += [*_stopped(deployment), *_left_behind(deployment)]
    return ending


def _hear(address: str, ending: RunEnding) -> None:
    """Query the coordinator's view, once it has published everything."""
    try:
        ending.complaints += published_order.wait_published(address, _PATIENCE_S)
        ending.balances = observation.balances(address)
        ending.late = published_order.late(address)
    except RankdumpError as error:
        ending.complaints.append(f"the coordinator: {error}")


def _stopped(deployment: FaultDeployment) -> Iterator[str]:
    for process in (*deployment.agents, deployment.coordinator):
        process.wanted = False
        process.kill(signal.SIGTERM)
        code = process.end(20)
        if code != 0:
            yield f"{process.name} ended with {code} after SIGTERM"


def _left_behind(deployment: FaultDeployment) -> Iterator[str]:
    for agent in deployment.agents:
        left = [str(path) for path in agent.run.rglob("*.slab")]
        left += [str(path) for path in (agent.tree / "dump").rglob("rank_*/**/.*.tmp")]
        closed = {life.session_id for life in observation.lives(agent.folder) if life.closed}
        yield from (f"{path} is left behind" for path in left if _of(path, closed))


def _of(path: str, closed: set[str]) -> bool:
    """Say whether a file that is left is of a session that ended well."""
    return any(session in path for session in closed)


def _all_live(deployment: FaultDeployment, player: SchedulePlayer) -> None:
    """Wait until every process is up, and every rank has been answered since then."""
    until_s = time.monotonic() + _PATIENCE_S
    servers = (deployment.coordinator, *deployment.agents)
    before: list[bytes] = []
    while time.monotonic() < until_s:
        if not all(rank.settled for rank in deployment.ranks) or not all(
            is_daemon_serving(s.address) for s in servers
        ):
            before = []
        elif not before:
            before = [rank.acknowledged for rank in deployment.ranks]
        elif all(
            rank.acknowledged != was for rank, was in zip(deployment.ranks, before, strict=True)
        ):
            break
        player.look_after()
        time.sleep(LOOK_S)


def _not_well(deployment: FaultDeployment) -> list[str]:
    """Return which ranks could not hand over everything, though nothing failed any more."""
    lives = {
        (life.rank, life.life): life for life in observation.lives(deployment.agents[0].folder)
    }
    last = [lives.get((rank.role.rank, rank.starts - 1)) for rank in deployment.ranks]
    return [
        f"rank {each.rank} life {each.life} kept something: {dict(each.left)}"
        for each in last
        if each is not None and not each.closed
    ]


def _retried(deployment: FaultDeployment) -> list[str]:
    """Wait until what failed before all was healed is written at last; return what is not."""
    until_s = time.monotonic() + _PATIENCE_S
    while True:
        found: list[str] = []
        for agent in deployment.agents:
            with contextlib.suppress(RankdumpError):  # the next step complains of its agent
                findings = fetch_agent_status(agent.address).findings
                found += [each for each in findings if each.endswith(_RETRIED)]
        if not found or time.monotonic() > until_s:
            return found
        time.sleep(LOOK_S)


def _drained(deployment: FaultDeployment) -> list[str]:
    found: list[str] = []
    for agent in deployment.agents:
        try:
            left = drain_agent(agent.address, timeout_s=_PATIENCE_S)
            view = fetch_agent_status(agent.address)
        except RankdumpError as error:
            found.append(f"agent {agent.name}: {error}")
            continue
        if left:
            found.append(f"agent {agent.name} has {left} records under way after a minute")
        waiting = [s.rank for s in view.sessions if s.state is SessionState.OPEN]
        if waiting:
            found.append(f"agent {agent.name} has open sessions of ranks {waiting}")
    return found


def _sizes(deployment: FaultDeployment) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for process in (*deployment.agents, deployment.coordinator):
        with contextlib.suppress(OSError):
            found[f"{process.name}_resident_mib"] = round(resident_bytes(process.pid) / MIB)
            found[f"{process.name}_descriptors"] = open_descriptors(process.pid)
    return found


def _figures(
    seen: RunObservation, deployment: FaultDeployment, player: SchedulePlayer, watcher: TreeWatcher
) -> dict[str, Any]:
    fates = Counter(row.fate for row in seen.ledger.rows)
    lives = {life.session_id: life for life in seen.lives}
    return {
        "faults": sum(player.happened.values()),
        "lives": len(seen.lives),
        "acknowledged": sum(life.acknowledged for life in seen.lives),
        "numbers": sum(map(len, seen.ledger.sequences.values())),
        "records": len(seen.ledger.rows),
        "fates": dict(fates),
        "figures": sum(seen.ledger.figures.values()),
        "dropped": dict(drops(seen)),
        "files": sum(not file.row for file in seen.files),
        "bytes": sum(_tree_bytes(agent.tree) for agent in deployment.agents),
        "manifests": len(seen.manifests),
        "told": len(seen.balances),
        "in_order": sum(seen.placed.values()),
        "late": sum(seen.late.values()),
        "twice_in_order": sum(count > 1 for count in seen.placed.values()),
        "not_in_order": sum(map(len, unplaced(seen, lives).values())),
        "growths": [asdict(each) for each in seen.growths],
        "starts": {process.name: process.starts for process in deployment.processes},
        "looks": watcher.looks,
        "manifests_looked_at": watcher.manifests,
    }


def _tree_bytes(tree: Path) -> int:
    room = os.statvfs(tree)
    return (room.f_blocks - room.f_bfree) * room.f_frsize


def keep(order: RunRequest, target: Path) -> None:
    """Copy what a broken run left, but for what is in the trees, to where it stays."""
    ignored = shutil.ignore_patterns("*.sock*", "*.slab", "dump", ".ballast*", "*.control")
    shutil.copytree(order.folder, target, ignore=ignored, dirs_exist_ok=True)
