"""Origin of a difference in the whole job, from the origins of its ranks. Pure.

Received data is not an origin: when the first bad tensor of a rank comes after a collective with
another rank whose data was bad earlier, the rank only received it. Without a published order,
results of collectives and gradients of parameters, which ranks share, are passed over in favour of
calls with earlier positions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from rankdump._analysis.compare import rank_origin
from rankdump._analysis.compare.rank_origin import RankOrigin
from rankdump._analysis.compare.report import ComparisonRow, DivergenceOrigin, SuspectCall
from rankdump._layout.tree_paths import PARAMETER_OP_TYPE

_COLLECTIVE_TYPE = re.compile(
    r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast(?!_?to|_?tensors)|receive|recv",
    re.IGNORECASE,
)
_LAST_POSITION = 1 << 62
"""Position of parameters and their gradients: after all calls of their iteration."""

RankCall: TypeAlias = "tuple[int, int, str]"
"""Rank, iteration and name of a call."""


@dataclass(frozen=True, slots=True)
class RankExchange:
    """A collective, or a received message."""

    iteration: int
    position: int
    senders: frozenset[int]
    receivers: frozenset[int]


@dataclass(frozen=True, slots=True)
class MergedCallOrder:
    """Positions of calls and exchanges in the published order."""

    positions: Mapping[RankCall, int] = field(default_factory=dict[RankCall, int])
    """Position of calls in the order of all ranks."""
    exchanges: Sequence[RankExchange] = ()


def find_job_origin(
    found: Sequence[RankOrigin], merged: MergedCallOrder, suspects: Sequence[SuspectCall]
) -> DivergenceOrigin:
    """Return the origin in the whole job, from those of ranks with their likeliest suspects."""
    earliest = min(each.iteration_key for each in found)
    candidates = [
        (each, suspect)
        for each, suspect in zip(found, suspects, strict=True)
        if each.iteration_key == earliest
    ]
    ranks = [each for each, _ in candidates]
    own = [pair for pair in candidates if find_sender(pair[0], ranks, merged) is None]
    # If every rank seems to have received the data from another, the sender is unknown.
    own = sorted(own or candidates, key=lambda pair: _make_order_key(pair[0], merged))
    return _join_rank_origins(own, merged)


def find_sender(
    found: RankOrigin, others: Sequence[RankOrigin], merged: MergedCallOrder
) -> int | None:
    """Return the rank that sent the bad data; None when it started on the rank itself."""
    ranks = (other.likeliest_row.rank for other in others if _is_sent_by(found, other, merged))
    return next(ranks, None)


def convert_rank_origin(found: RankOrigin, suspects: tuple[SuspectCall, ...]) -> DivergenceOrigin:
    """Return the origin of one rank."""
    question = found.question
    return DivergenceOrigin(
        question.kind, question.side, not found.ambiguity, suspects, found.ambiguity
    )


def _join_rank_origins(
    own: list[tuple[RankOrigin, SuspectCall]], merged: MergedCallOrder
) -> DivergenceOrigin:
    first, suspect = own[0]
    question = first.question
    rows = [each.likeliest_row for each, _ in own]
    if len({(row.name_a, row.name_b) for row in rows}) > 1:
        ranks = ", ".join(str(row.rank) for row in rows[:8])
        order = "the merged order" if merged.positions else "their own order"
        why = (
            f"it starts at different calls on ranks {ranks}; the first one listed is the "
            f"earliest in {order}"
        )
        return DivergenceOrigin(question.kind, question.side, False, tuple(s for _, s in own), why)
    sure = [pair for pair in own if not pair[0].ambiguity] or own[:1]
    first, suspect = sure[0]
    # The amount in the reason has to be an upper bound for all these ranks.
    _, widest = max(sure, key=lambda pair: pair[0].error_key)
    others = sorted(row.rank for row in rows if row is not first.likeliest_row)
    reason = widest.reason + (rank_origin.describe_other_ranks(others) if others else "")
    named = replace(suspect, reason=reason)
    return DivergenceOrigin(
        question.kind, question.side, not first.ambiguity, (named,), first.ambiguity
    )


def _is_sent_by(found: RankOrigin, other: RankOrigin, merged: MergedCallOrder) -> bool:
    """Return whether a rank received the bad data from another one."""
    own, its = found.likeliest_row, other.likeliest_row
    if its.rank == own.rank:
        return False
    at, sent_at = _find_position(found, merged), _find_position(other, merged)
    if at is not None and sent_at is not None:
        return any(
            each.iteration == own.iteration
            and sent_at <= each.position <= at
            and its.rank in each.senders
            and own.rank in each.receivers
            for each in merged.exchanges
        )
    return _is_shared_call(own) and not _is_shared_call(its) and its.position < own.position


def _make_order_key(found: RankOrigin, merged: MergedCallOrder) -> tuple[int, int, int]:
    at, row = _find_position(found, merged), found.likeliest_row
    return _LAST_POSITION if at is None else at, row.position, row.rank


def _find_position(found: RankOrigin, merged: MergedCallOrder) -> int | None:
    """Return the position of the likeliest call in the merged order; None when it is unknown."""
    row = found.likeliest_row
    if merged.positions and row.op_type == PARAMETER_OP_TYPE:
        return _LAST_POSITION
    name = row.name_b if found.question.side == "b" else row.name_a
    return merged.positions.get((row.rank, row.iteration, name))


def _is_shared_call(row: ComparisonRow) -> bool:
    """Return whether the result of a call is the same on several ranks."""
    return row.op_type == PARAMETER_OP_TYPE or _COLLECTIVE_TYPE.search(row.op_type) is not None
