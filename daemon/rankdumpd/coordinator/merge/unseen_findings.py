"""Findings about collectives that ranks executed and that are not in the order. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rankdump._core.events import (
    UNSEEN_REASON_TEXTS,
    EventColumns,
    Finding,
    FindingKind,
)
from rankdumpd.coordinator.merge.absence_findings import describe_ranks

_RanksByCase = dict[tuple[str, str, int], list[int]]
"""Ranks by group, reason and number."""


def build_unseen_findings(events: Mapping[int, Sequence[EventColumns]]) -> Iterator[Finding]:
    """Yield a finding for each group, reason and number of collectives that were not seen."""
    for (group, reason, count), ranks in sorted(_collect_cases(events).items()):
        where = f" of group {group!r}" if group else ""
        number = f"{count} " if count else ""
        one = count == 1
        why = UNSEEN_REASON_TEXTS.get(reason, f"the reason is {reason!r}")
        yield Finding(
            kind=FindingKind.COLLECTIVES_NOT_SEEN,
            iteration=0,
            text=f"{number}collective{'' if one else 's'}{where} on {describe_ranks(ranks)} "
            f"{'is' if one else 'are'} not in the order: {why}",
            ranks=tuple(ranks),
            group=group,
        )


def _collect_cases(events: Mapping[int, Sequence[EventColumns]]) -> _RanksByCase:
    cases: _RanksByCase = {}
    for rank in sorted(events):
        counts: Counter[tuple[str, str]] = Counter()
        for each in (each for batch in events[rank] for each in batch.unseen):
            counts[each.group, each.reason] += each.count
        for (group, reason), count in counts.items():
            cases.setdefault((group, reason, count), []).append(rank)
    return cases
