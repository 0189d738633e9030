"""Merge of the calls of all ranks in dumps of other tools into one order, in which a collective is
one entry with all of its members. Pure: no clock, no disk.

An entry comes after all calls that any of its ranks made before it. Among the entries that may come
next, the earliest one does; clocks of hosts may differ, so times never contradict the order of a
rank. A cycle of ranks that wait for each other is a finding; one of its collectives is then listed
before all of its ranks have reached it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rankdump._core.events import EventKind, Finding, FindingKind
from rankdump._core.status import OrderEntry

_MAX_CYCLES = 10
_OF_ONE_SIZE = (EventKind.ALL_REDUCE, EventKind.BROADCAST, EventKind.REDUCE, EventKind.ALL_GATHER)
"""Collectives in which all members contribute the same number of elements."""


_MEMBER_CHECKS = (
    (FindingKind.OPERATION_MISMATCH, "call different operations", "name"),
    (FindingKind.SIZE_MISMATCH, "give different numbers of elements", "element_count"),
    (FindingKind.DTYPE_MISMATCH, "give different element types", "dtype"),
)
"""Checks that the members of a collective agree: kind of the finding, its words, and the field."""


class RankCall(NamedTuple):
    """One call of a rank."""

    name: str
    kind: EventKind = EventKind.OPERATOR
    key: Hashable = None
    """Key that the calls of all members of one collective have in common; None for any
    other call.
    """
    group: str = ""
    members: tuple[int, ...] = ()
    """Global ranks of the call's group; empty if they are unknown."""
    sequence: int = 0
    start_us: int = 0
    end_us: int = 0
    element_count: int = 0
    dtype: str = ""
    peer: int = -1


@dataclass(slots=True)
class _OrderNode:
    """An entry that is being collected: its calls by rank, each with its position."""

    calls: dict[int, tuple[int, RankCall]] = field(
        default_factory=dict[int, "tuple[int, RankCall]"]
    )
    waiting: int = 0
    """Number of ranks that have not reached the entry yet."""
    is_listed: bool = False


class MergedCalls(NamedTuple):
    """The merged order of a dump, or of one iteration."""

    entries: list[OrderEntry]
    findings: list[Finding]
    notes: tuple[str, ...] = ()
    """Sentences about what the order does not show."""


def merge_calls(
    programs: Mapping[int, Sequence[RankCall]], *, iteration: int, first_position: int = 0
) -> MergedCalls:
    """Return the order of the ranks' calls in one iteration, with positions from `first_position`
    on.
    """
    nodes: dict[Hashable, _OrderNode] = {}
    chains: dict[int, list[_OrderNode]] = {}
    for rank, calls in programs.items():
        counts: defaultdict[Hashable, int] = defaultdict(int)
        chain = chains[rank] = []
        for position, call in enumerate(calls):
            shared = (call.key, counts[call.key]) if call.key is not None else (rank, position, "")
            counts[call.key] += 1
            node = nodes.setdefault(shared, _OrderNode())
            node.calls[rank] = position, call
            node.waiting += 1
            chain.append(node)
    findings: list[Finding] = []
    ordered = _order_nodes(chains, iteration, findings)
    entries = [
        _make_entry(node, iteration, first_position + at, programs.keys() & _members(node))
        for at, node in enumerate(ordered)
    ]
    for node, entry in zip(ordered, entries, strict=True):
        findings += _check_members(node, entry)
    return MergedCalls(entries, findings)


def _order_nodes(
    chains: Mapping[int, Sequence[_OrderNode]], iteration: int, findings: list[Finding]
) -> list[_OrderNode]:
    heads = dict.fromkeys(chains, 0)
    ready: list[tuple[int, int, int]] = []
    ordered: list[_OrderNode] = []

    def advance_rank(rank: int) -> None:
        """Advance a rank to its next call that is not listed yet; an entry that all ranks have
        reached is ready.
        """
        chain = chains[rank]
        while heads[rank] < len(chain) and chain[heads[rank]].is_listed:
            heads[rank] += 1
        if heads[rank] < len(chain):
            node = chain[heads[rank]]
            node.waiting -= 1
            if node.waiting == 0:
                _, call = node.calls[rank]
                heapq.heappush(ready, (call.start_us, heads[rank], rank))

    for rank in chains:
        advance_rank(rank)
    while True:
        if ready:
            _, at, rank = heapq.heappop(ready)
            node = chains[rank][at]
        else:
            stuck = [
                (rank, chains[rank][at]) for rank, at in heads.items() if at < len(chains[rank])
            ]
            if not stuck:
                return ordered
            node = min(stuck, key=lambda each: each[1].calls[each[0]][1].start_us)[1]
            if len(findings) < _MAX_CYCLES:
                findings.append(_describe_cycle(stuck, iteration))
        node.is_listed = True
        ordered.append(node)
        for member in node.calls:
            if heads[member] < len(chains[member]) and chains[member][heads[member]] is node:
                advance_rank(member)


def _describe_cycle(stuck: Sequence[tuple[int, _OrderNode]], iteration: int) -> Finding:
    waits = ", ".join(f"rank {rank} in {node.calls[rank][1].name}" for rank, node in stuck[:8])
    ranks = tuple(rank for rank, _ in stuck)
    text = f"iteration {iteration}: ranks wait for each other in a circle: {waits}"
    return Finding(FindingKind.CYCLE, iteration, text, ranks)


def _members(node: _OrderNode) -> set[int]:
    return {rank for _, call in node.calls.values() for rank in call.members}


def _make_entry(node: _OrderNode, iteration: int, position: int, known: set[int]) -> OrderEntry:
    ranks = tuple(sorted(node.calls))
    _, first = node.calls[ranks[0]]
    calls = [call for _, call in node.calls.values()]
    return OrderEntry(
        position=position,
        graph=0,
        iteration=iteration,
        ranks=ranks,
        name=first.name,
        kind=first.kind,
        group=first.group,
        sequence=first.sequence,
        start_us=min(call.start_us for call in calls),
        end_us=max(call.end_us for call in calls),
        missing=tuple(sorted(known - set(ranks))),
        rank_positions=tuple(node.calls[rank][0] for rank in ranks),
        streams=(0,) * len(ranks),
        element_count=first.element_count,
        dtype=first.dtype,
        peer=first.peer,
    )


def _check_members(node: _OrderNode, entry: OrderEntry) -> list[Finding]:
    """Return findings about differences between the calls of a collective's members."""
    found: list[Finding] = []
    if entry.missing:
        ranks = ", ".join(map(str, entry.missing))
        text = f"iteration {entry.iteration}: rank {ranks} never came to {entry.name}"
        found.append(_make_finding(FindingKind.MISSING_MEMBER, entry, text, entry.missing))
    calls = {rank: call for rank, (_, call) in sorted(node.calls.items())}
    for kind, what, field_name in _MEMBER_CHECKS:
        if kind is FindingKind.SIZE_MISMATCH and entry.kind not in _OF_ONE_SIZE:
            continue
        values: dict[int, str | int] = {r: getattr(c, field_name) for r, c in calls.items()}
        first = values[entry.ranks[0]]
        others = tuple(rank for rank, value in values.items() if value != first)
        if others:
            text = (
                f"iteration {entry.iteration}: members of {entry.name} {what}: {first} on rank "
                f"{entry.ranks[0]}, {values[others[0]]} on rank {others[0]}"
            )
            found.append(_make_finding(kind, entry, text, others))
            break
    return found


def _make_finding(
    kind: FindingKind, entry: OrderEntry, text: str, ranks: tuple[int, ...]
) -> Finding:
    return Finding(kind, entry.iteration, text, ranks, entry.group, entry.sequence, entry.name)


def merge_iterations(
    programs: Mapping[tuple[int, int], Sequence[RankCall]], notes: tuple[str, ...] = ()
) -> MergedCalls:
    """Return the order of all iterations, given the calls by iteration and rank."""
    by_iteration: defaultdict[int, dict[int, Sequence[RankCall]]] = defaultdict(dict)
    for (iteration, rank), calls in programs.items():
        by_iteration[iteration][rank] = calls
    entries: list[OrderEntry] = []
    findings: list[Finding] = []
    for iteration, own in sorted(by_iteration.items()):
        merged = merge_calls(own, iteration=iteration, first_position=len(entries))
        entries += merged.entries
        findings += merged.findings
    return MergedCalls(entries, findings, notes)
