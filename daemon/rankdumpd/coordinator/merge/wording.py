"""Names calls and ranks the way a reader of a finding needs them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rankdump.contract.events import EventKind, ProcessGroup
from rankdump.contract.findings import Finding, FindingKind
from rankdumpd.coordinator.merge.match import Match
from rankdumpd.coordinator.merge.table import Table

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class CallWords:
    """What a call is, in words and as the fields of a finding."""

    text: str
    """With its number, its group and its ranks."""
    group: ProcessGroup
    sequence: int
    name: str
    position: int
    """On the lowest rank that took part."""


def call_words(table: Table, match: Match, call: int) -> CallWords:
    """Return what a call is."""
    members = match.of(call)
    fields = ("kind", "group", "sequence", "row", "rank", "peer", "position")
    first = {field: int(table.members[field][members[0]]) for field in fields}
    kind, group = EventKind(first["kind"]), table.groups[first["group"]]
    rank, peer, number = first["rank"], first["peer"], first["sequence"]
    name = table.name(first["row"])
    if kind is EventKind.SEND:
        whose = f" from rank {rank} to rank {peer}"
    elif kind is EventKind.RECV:
        whose = f" from rank {peer} on rank {rank}"
    else:
        whose = f" ({ranks_words(group.ranks or table.members['rank'][members].tolist())})"
    text = f"{kind.name.lower()} {name!r} number {number} of group {group.name!r}{whose}"
    return CallWords(text, group, number, name, first["position"])


def ranks_words(ranks: Sequence[int]) -> str:
    """Return `rank 3` or `ranks 0 1 2`, long lists cut with their number."""
    shown = " ".join(map(str, ranks[:_SHOWN]))
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}{more}"


def call_finding(
    kind: FindingKind,
    text: str,
    call: CallWords,
    *,
    ranks: tuple[int, ...],
    last: tuple[str, int] | None = None,
) -> Finding:
    """Return a finding about a call; `last` is what the first of the ranks did before instead.

    Which iteration it is, and whether that still runs, is put to it for all findings at once.
    """
    name, position = last or (call.name, call.position)
    return Finding(
        kind=kind,
        iteration=0,
        text=text,
        ranks=ranks,
        group=call.group.name,
        sequence=call.sequence,
        name=name,
        position=position,
    )
