"""Names calls and ranks the way a reader of a finding needs them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rankdump.contract.events import EventKind
from rankdumpd.coordinator.merge.match import Match
from rankdumpd.coordinator.merge.table import Table

_SHOWN = 8


def call_words(table: Table, match: Match, call: int) -> str:
    """Return what a call is, with its number, its group and its ranks."""
    row = match.rows_of(call)[0]
    kind = EventKind(int(table["kind"][row]))
    group = table.groups[int(table["group"][row])]
    number = int(table["sequence"][row])
    words = f"{kind.name.lower()} {table.name(row)!r} number {number} of group {group.name!r}"
    rank, peer = int(table["rank"][row]), int(table["peer"][row])
    if kind is EventKind.SEND:
        return f"{words} from rank {rank} to rank {peer}"
    if kind is EventKind.RECV:
        return f"{words} from rank {peer} on rank {rank}"
    return f"{words} ({ranks_words(group.ranks or table['rank'][match.rows_of(call)].tolist())})"


def ranks_words(ranks: Sequence[int]) -> str:
    """Return `rank 3` or `ranks 0 1 2`, long lists cut with their number."""
    shown = " ".join(map(str, ranks[:_SHOWN]))
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}{more}"
