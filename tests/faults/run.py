"""One run: cast, schedule, end, verdict."""

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

from faults import orders, witness
from faults.cast import MIB, Cast, cast_of
from faults.director import LOOK_S, Director
from faults.growth import Scales
from faults.laws import unplaced
from faults.limits import open_descriptors, resident_bytes
from faults.lookout import Lookout
from faults.oracle import breaches, drops
from faults.values import Fault, Placed, Seen, Verdict

from rankdump._cli.daemon_client import drain_agent, fetch_agent_status
from rankdump._core.status import SessionState
from rankdump._embedded.daemon_lease import is_daemon_serving
from rankdump.errors import RankdumpError

_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be run."""

    seed: int
    seconds: float
    faults: Sequence[Fault]
    small: bool
    pause_s: float
    folder: Path


@dataclass(slots=True)
class Ending:
    """What became of everybody, and what the coordinator knew then."""

    complaints: list[str]
    balances: dict[tuple[str, int], tuple[int, int, int]]
    late: Mapping[tuple[int, int], int]
    sizes: dict[str, Any]


def run(order: Order, say: Callable[[str], None]) -> Verdict:
    """Return the verdict over one run, which is made in a mount namespace of its own."""
    cast = cast_of(order.folder, small=order.small, pause_s=order.pause_s)
    for actor in (*cast.agents, cast.coordinator):
        for disk in actor.disks:
            disk.mount()
    lookout = Lookout([agent.tree / "dump" for agent in cast.agents], order.seed)
    scales = Scales(cast)
    director = Director(cast, order.faults, say=say)
    begun_s = time.monotonic()
    try:
        _begin(cast)
        director.play(order.seconds)
        played_s = time.monotonic() - begun_s
        ending = _finish(cast, director, scales, say)
    finally:
        scales.close()
        lookout.close()
        cast.close()
    say("reading what is left")
    happened = dict(director.happened)
    seen = _seen(order, cast, ending, lookout, scales)
    return Verdict(
        order.seed,
        round(played_s, 1),
        happened,
        dict(director.missed),
        _figures(seen, cast, director, lookout) | ending.sizes,
        breaches(seen, happened),
    )


def _seen(order: Order, cast: Cast, ending: Ending, lookout: Lookout, scales: Scales) -> Seen:
    """Return all that there is to see."""
    states = [agent.state for agent in cast.agents]
    roots = [agent.tree / "dump" for agent in cast.agents]
    complaints = ending.complaints + lookout.complaints
    placed: Counter[Placed] = Counter()
    for agent, root in zip(cast.agents, roots, strict=True):
        found, unread = orders.published(root, agent.job_id)
        placed.update(found)
        complaints += unread
    seen = witness.seen(order.folder, states, roots, ending.balances, complaints)
    return replace(seen, placed=placed, late=ending.late, growths=scales.growths())


def _begin(cast: Cast) -> None:
    """Start everybody; return when every rank has been told that something of it is safe."""
    for actor in (cast.coordinator, *cast.agents):
        actor.start()
    until_s = time.monotonic() + _PATIENCE_S
    while not all(is_daemon_serving(actor.address) for actor in (cast.coordinator, *cast.agents)):
        assert time.monotonic() < until_s, "the daemons do not come up"
    for rank in cast.ranks:
        rank.start()
    while not all(rank.up for rank in cast.ranks):
        assert time.monotonic() < until_s, "the ranks do not come up"
        time.sleep(LOOK_S)


def _finish(cast: Cast, director: Director, scales: Scales, say: Callable[[str], None]) -> Ending:
    """Let everybody end well; return what did not, and what the coordinator knew."""
    ending = Ending(list(director.ends), {}, {}, {})
    for actor in cast.actors:
        actor.control.heal()
    for proxy in cast.proxies:
        proxy.hole(False)
        proxy.delay(0)
    say("healed; ranks say goodbye")
    _all_live(cast, director)
    for rank in cast.ranks:
        rank.wanted = False
        rank.kill(signal.SIGUSR1)
    for rank in cast.ranks:
        code = rank.end(_PATIENCE_S)
        if code != 0:
            ending.complaints.append(f"rank {rank.role.rank} ended with {code}")
    ending.complaints += [*_not_well(cast), *_drained(cast)]
    _hear(cast.coordinator.address, ending)
    ending.sizes = _sizes(cast)
    scales.close()
    say("daemons stop")
    ending.complaints += [*_stopped(cast), *_left_behind(cast)]
    return ending


def _hear(address: str, ending: Ending) -> None:
    """Ask the coordinator for all that it knows, once it has published it."""
    try:
        ending.complaints += orders.wait_published(address, _PATIENCE_S)
        ending.balances = witness.balances(address)
        ending.late = orders.late(address)
    except RankdumpError as error:
        ending.complaints.append(f"the coordinator: {error}")


def _stopped(cast: Cast) -> Iterator[str]:
    for actor in (*cast.agents, cast.coordinator):
        actor.wanted = False
        actor.kill(signal.SIGTERM)
        code = actor.end(20)
        if code != 0:
            yield f"{actor.name} ended with {code} after SIGTERM"


def _left_behind(cast: Cast) -> Iterator[str]:
    for agent in cast.agents:
        left = [str(path) for path in agent.run.rglob("*.slab")]
        left += [str(path) for path in (agent.tree / "dump").rglob("rank_*/**/.*.tmp")]
        closed = {life.session_id for life in witness.lives(agent.folder) if life.closed}
        yield from (f"{path} is left behind" for path in left if _of(path, closed))


def _of(path: str, closed: set[str]) -> bool:
    """Say whether a file that is left is of a session that ended well."""
    return any(session in path for session in closed)


def _all_live(cast: Cast, director: Director) -> None:
    """Wait until everybody has been up for a while, so that a goodbye is heard."""
    until_s = time.monotonic() + _PATIENCE_S
    servers = (cast.coordinator, *cast.agents)
    while time.monotonic() < until_s:
        if all(rank.settled for rank in cast.ranks) and all(
            is_daemon_serving(s.address) for s in servers
        ):
            break
        director.look_after()
        time.sleep(LOOK_S)


def _not_well(cast: Cast) -> list[str]:
    """Return which ranks could not hand over everything, though nothing failed any more."""
    lives = {(life.rank, life.life): life for life in witness.lives(cast.agents[0].folder)}
    last = [lives.get((rank.role.rank, rank.starts - 1)) for rank in cast.ranks]
    return [f"rank {each.rank} life {each.life} kept something" for each in last
            if each is not None and not each.closed]  # fmt: skip


def _drained(cast: Cast) -> list[str]:
    found: list[str] = []
    for agent in cast.agents:
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


def _sizes(cast: Cast) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for actor in (*cast.agents, cast.coordinator):
        with contextlib.suppress(OSError):
            found[f"{actor.name}_resident_mib"] = round(resident_bytes(actor.pid) / MIB)
            found[f"{actor.name}_descriptors"] = open_descriptors(actor.pid)
    return found


def _figures(seen: Seen, cast: Cast, director: Director, lookout: Lookout) -> dict[str, Any]:
    fates = Counter(row.fate for row in seen.ledger.rows)
    lives = {life.session_id: life for life in seen.lives}
    return {
        "faults": sum(director.happened.values()),
        "lives": len(seen.lives),
        "acknowledged": sum(life.acknowledged for life in seen.lives),
        "numbers": sum(map(len, seen.ledger.sequences.values())),
        "records": len(seen.ledger.rows),
        "fates": dict(fates),
        "figures": sum(seen.ledger.figures.values()),
        "dropped": dict(drops(seen)),
        "files": sum(not file.row for file in seen.files),
        "bytes": sum(_tree_bytes(agent.tree) for agent in cast.agents),
        "manifests": len(seen.manifests),
        "told": len(seen.balances),
        "in_order": sum(seen.placed.values()),
        "late": sum(seen.late.values()),
        "twice_in_order": sum(count > 1 for count in seen.placed.values()),
        "not_in_order": sum(map(len, unplaced(seen, lives).values())),
        "growths": [asdict(each) for each in seen.growths],
        "starts": {actor.name: actor.starts for actor in cast.actors},
        "looks": lookout.looks,
        "manifests_looked_at": lookout.manifests,
    }


def _tree_bytes(tree: Path) -> int:
    room = os.statvfs(tree)
    return (room.f_blocks - room.f_bfree) * room.f_frsize


def keep(order: Order, target: Path) -> None:
    """Copy what a broken run left, but for what is in the trees, to where it stays."""
    ignored = shutil.ignore_patterns("*.sock*", "*.slab", "dump", ".ballast*", "*.control")
    shutil.copytree(order.folder, target, ignore=ignored, dirs_exist_ok=True)
