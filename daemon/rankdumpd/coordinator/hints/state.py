"""What the hints of a job remember of the iterations that were merged. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rankdump.contract.errors import DamagedError
from rankdump.contract.events import EventKind, ProcessGroup
from rankdumpd.coordinator.hints.spread import CallSpread, Program, call_spreads
from rankdumpd.coordinator.values import GlobalOrder

MAX_HISTORY = 64
MAX_GROUPS = 4096
_VERSION = 1
_MOST = (1 << 63) - 1
"""Numbers of collectives are signed where they are told."""


@dataclass(frozen=True, slots=True)
class Widest:
    """The widest spread of a group, and where that was."""

    iteration: int
    sequence: int
    kind: str
    name: str
    first_rank: int
    last_rank: int
    spread_us: int
    dump_us: int
    arrived: bool


@dataclass(frozen=True, slots=True)
class GroupHistory:
    """One group so far."""

    first: Widest | None = None
    """The first collective of all, in which the members connect: another limit covers it."""
    widest: Widest | None = None
    """Of all that came after it."""
    history: tuple[tuple[int, int], ...] = ()
    """Iteration and its widest spread after the first collective; the newest ones."""


@dataclass(frozen=True, slots=True)
class HintState:
    """All of a job."""

    iteration: int = -1
    """The last one merged."""
    stalls: Mapping[int, int] = field(default_factory=dict[int, int])
    """How long dumping had held each rank up when it started its last call."""
    delays: Mapping[int, int] = field(default_factory=dict[int, int])
    """How much later than without dumping each rank was after its last call."""
    groups: Mapping[ProcessGroup, GroupHistory] = field(
        default_factory=dict[ProcessGroup, GroupHistory]
    )

    def to_json(self) -> str:
        """Return the state as one line of text."""
        groups = [
            {"name": group.name, "ranks": group.ranks, **asdict(history)}
            for group, history in self.groups.items()
        ]
        whole = {
            "version": _VERSION,
            "iteration": self.iteration,
            "ranks": [[rank, self.stalls[rank], self.delays.get(rank, 0)] for rank in self.stalls],
            "groups": groups,
        }
        return json.dumps(whole, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> HintState:
        """Read it back; DamagedError when it is something else."""
        try:
            whole: Any = json.loads(text)
            if whole["version"] != _VERSION:
                raise ValueError(f"version {whole['version']!r}")
            ranks: list[list[int]] = whole["ranks"]
            return HintState(
                iteration=int(whole["iteration"]),
                stalls={int(rank): int(stall) for rank, stall, _ in ranks},
                delays={int(rank): int(delay) for rank, _, delay in ranks},
                groups=dict(map(_group, whole["groups"])),
            )
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise DamagedError(f"not a state of hints: {error!r}") from None


def observed(
    state: HintState, order: GlobalOrder, stalls: Mapping[int, int] | None = None
) -> HintState:
    """Return the state after one more iteration; `stalls` are those that ranks said last."""
    # Iterations between, which are not dumped, have levelled the ranks by their collectives.
    follows = order.iteration - state.iteration in (0, 1)
    delays: Mapping[int, int] = state.delays if follows else {}
    programs = {rank: Program(stall, delays.get(rank, 0)) for rank, stall in state.stalls.items()}
    groups = dict(state.groups)
    for (group, first), spread in _widest_spreads(order, programs, stalls or {}).items():
        history = groups.get(group, GroupHistory())
        groups[group] = _with(history, _described(order, spread), first=first)
    return HintState(
        iteration=order.iteration,
        stalls={rank: program.stall_us for rank, program in programs.items()},
        delays={rank: program.delay_us for rank, program in programs.items()},
        groups=_bounded(groups),
    )


def _widest_spreads(
    order: GlobalOrder, programs: dict[int, Program], stalls: Mapping[int, int]
) -> dict[tuple[ProcessGroup, bool], CallSpread]:
    """Return the widest spread of each group, its first collective apart."""
    columns = order.calls.columns
    groups: list[int] = columns["group"].tolist()
    first: list[bool] = ((columns["sequence"] == 0) & (columns["kind"] < _MESSAGE)).tolist()
    widest: dict[tuple[int, bool], CallSpread] = {}
    for spread in call_spreads(order, programs, stalls):
        key = (groups[spread.call], first[spread.call])
        known = widest.get(key)
        if known is None or spread.spread_us > known.spread_us:
            widest[key] = spread
    return {(order.groups[group], start): spread for (group, start), spread in widest.items()}


_MESSAGE = int(EventKind.SEND)
"""This and what is above it are messages."""


def _described(order: GlobalOrder, spread: CallSpread) -> Widest:
    columns, call = order.calls.columns, spread.call
    return Widest(
        iteration=order.iteration,
        sequence=min(int(columns["sequence"][call]), _MOST),
        kind=EventKind(int(columns["kind"][call])).name.lower(),
        name=order.names[int(columns["name"][call])],
        first_rank=spread.first_rank,
        last_rank=spread.last_rank,
        spread_us=spread.spread_us,
        dump_us=spread.dump_us,
        arrived=spread.arrived,
    )


def _with(history: GroupHistory, new: Widest, *, first: bool) -> GroupHistory:
    if first:
        return replace(history, first=_wider(history.first, new))
    earlier = tuple(point for point in history.history if point[0] != new.iteration)
    points = (*earlier, (new.iteration, new.spread_us))[-MAX_HISTORY:]
    return replace(history, widest=_wider(history.widest, new), history=points)


def _wider(known: Widest | None, new: Widest) -> Widest:
    """Return the wider one; of equals the one known before."""
    return new if known is None or new.spread_us > known.spread_us else known


def _bounded(groups: dict[ProcessGroup, GroupHistory]) -> dict[ProcessGroup, GroupHistory]:
    """Return at most MAX_GROUPS of them: a job may make groups without end."""
    if len(groups) <= MAX_GROUPS:
        return groups
    by_spread = sorted(groups.items(), key=lambda item: _spread(item[1]), reverse=True)
    return dict(by_spread[:MAX_GROUPS])


def _spread(history: GroupHistory) -> int:
    return max(each.spread_us if each else 0 for each in (history.first, history.widest))


def _group(value: Any) -> tuple[ProcessGroup, GroupHistory]:
    history = tuple((int(iteration), int(spread)) for iteration, spread in value["history"])
    group = ProcessGroup(str(value["name"]), tuple(map(int, value["ranks"])))
    return group, GroupHistory(_widest(value["first"]), _widest(value["widest"]), history)


def _widest(value: Any) -> Widest | None:
    return None if value is None else Widest(**value)
