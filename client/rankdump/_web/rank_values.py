"""Numbers for each iteration of each rank, for the map of ranks: how long the iteration took,
according to the merged order if the tree has one, else to the time stamps of its tensors; and how
many tensors differ from those of another rank or tree, by digests, or by fingerprints if a side has
no digests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankdump._analysis.reader.order_times import read_rank_times
from rankdump._core.selection import GRADIENTS_PREFIX
from rankdump._core.units import format_count
from rankdump._layout.tree_paths import PARAMETER_OP_TYPE
from rankdump._web.dump_source import DumpSource, JobAttempt, match_rows
from rankdump._web.order_page import open_order
from rankdump._web.page_kinds import MAX_NUMBER, AbsentPageError


@dataclass(frozen=True, slots=True)
class RankValues:
    """A statistic in each iteration of each rank."""

    ranks: tuple[int, ...]
    iterations: tuple[int, ...]
    values: npt.NDArray[np.float64]
    """Values by rank and iteration; NaN also if there is no value."""
    is_there: npt.NDArray[np.bool_]
    note: str = ""
    """What the numbers are, if their name does not tell it."""


def arrange_values(
    ranks: npt.NDArray[np.int64],
    iterations: npt.NDArray[np.int64],
    values: npt.NDArray[np.float64],
    note: str = "",
) -> RankValues:
    """Return values as an array by rank and iteration; each place has at most one value."""
    (known_ranks, row_of), (known_iterations, column_of) = (
        np.unique(column, return_inverse=True) for column in (ranks, iterations)
    )
    cells = np.full((len(known_ranks), len(known_iterations)), np.nan)
    is_there = np.zeros(cells.shape, np.bool_)
    cells[row_of, column_of] = values
    is_there[row_of, column_of] = True
    places = tuple(known_ranks.tolist()), tuple(known_iterations.tolist())
    return RankValues(*places, cells, is_there, note)


_BY_ORDER = (
    "from the start of the first entry of the order to the end of the last, with collectives"
)
_BY_TENSORS = (
    "from the first tensor to the last, by the clock of the rank: no order of all ranks was used"
)
_MAX_ORDER_BYTES = 256 << 20
"""Largest size in bytes of an order that is read, because reading a longer one takes seconds."""
_FROM_TENSORS = (
    "SELECT rank, iteration, min(timestamp_us) AS start_us, max(timestamp_us) AS end_us "
    "FROM tensors WHERE iteration IS NOT NULL AND timestamp_us > 0 GROUP BY rank, iteration"
)


def read_times(source: DumpSource) -> RankValues:
    """Return milliseconds for each rank and iteration; CorruptedError for an order that cannot be
    read.
    """
    found, note = _read_order_times(source), _BY_ORDER
    if found is None or not len(found):
        found, note = source.read_table(_FROM_TENSORS), _BY_TENSORS
    ranks, iterations, starts, ends = (
        found.column(name).to_numpy() for name in ("rank", "iteration", "start_us", "end_us")
    )
    return arrange_values(ranks, iterations, (ends - starts).astype(np.float64) / 1e3, note)


def _read_order_times(source: DumpSource) -> pa.Table | None:
    """Return the times in the order; None if there is none, or if it is too long for a page."""
    try:
        order = open_order(source)
    except AbsentPageError:
        return None
    size = sum(path.stat().st_size for path in order.paths)
    return read_rank_times(order, source.part.attempt) if size <= _MAX_ORDER_BYTES else None


_MAX_ROWS = 1 << 17
"""Largest number of rows that are compared together, unless one rank's iteration has more."""
COPIES_CONDITION = (
    f"(CAST(op_type AS VARCHAR) = '{PARAMETER_OP_TYPE}' "
    f"OR starts_with(CAST(name AS VARCHAR), '{GRADIENTS_PREFIX}'))"
)
"""SQL condition for parameters and gradients, which ranks with different data have in common."""
_PART = (
    "CASE WHEN layout IS NULL THEN '' ELSE regexp_replace(CAST(layout AS VARCHAR), "
    "'[^,]* [0-9]+/[0-9]+ Replicate(, )?', '', 'g') END"
)
"""SQL for the part of a logical tensor that a row is, without mesh dimensions along which ranks
have copies.
"""
_IN_SPAN = "iteration BETWEEN ? AND ? AND rank BETWEEN ? AND ?"
_STATEMENT = (
    f"SELECT rank, iteration, hash(name, side, slot, microbatch, {_PART}) AS key, "
    "hash(coalesce(nullif(digest, ''), md5)) AS digest, "
    "coalesce(digest, md5, '') <> '' AS has_digest, "
    "coalesce(fingerprint, 0) AS fingerprint, fingerprint IS NOT NULL AS has_fingerprint "
    f"FROM tensors WHERE {_IN_SPAN} AND {{}} ORDER BY iteration, rank, attempt, position"
)
_FACTORS = tuple(
    np.uint64(each) for each in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
)
"""Odd numbers that spread keys over 64 bits (of xxHash and SplitMix64)."""
_Keys = npt.NDArray[np.uint64]


class DifferenceRequest(NamedTuple):
    """Which tensors are compared with which."""

    base: int | None
    """Rank that all others are compared with; None for the same rank of another tree."""
    only_copies: bool
    """Whether only parameters and gradients are compared."""
    search: str
    """Part of the operators' names."""


class _RowSpan(NamedTuple):
    """Iterations and ranks that are read together."""

    first: int
    last: int
    first_rank: int
    last_rank: int


_EVERYTHING = _RowSpan(0, MAX_NUMBER, 0, MAX_NUMBER)


class _TensorColumns(NamedTuple):
    """Tensors in the order of iteration, rank and execution."""

    rank: npt.NDArray[np.int64]
    iteration: npt.NDArray[np.int64]
    key: _Keys
    """Key that a tensor has in common with its counterparts on other ranks or in other trees; it
    includes a number for repeated tensors.
    """
    digest: _Keys
    has_digest: npt.NDArray[np.bool_]
    fingerprint: _Keys
    has_fingerprint: npt.NDArray[np.bool_]


def count_differences(
    source: DumpSource, other: DumpSource, request: DifferenceRequest
) -> RankValues:
    """Return how many tensors of each rank and iteration differ from those of the base."""
    if request.base is None and other.part.attempt is None and other.attempts:
        other = other.select(JobAttempt(*other.attempts[-1]))
    counts: list[npt.NDArray[np.int64]] = []
    total, paired = 0, 0
    for span in _iter_spans(source, request):
        own = _read_columns(source, request, span)
        rank = request.base
        base = own
        if rank is None:
            base = _read_columns(other, request, span)
        elif not span.first_rank <= rank <= span.last_rank:
            base = _read_columns(source, request, span._replace(first_rank=rank, last_rank=rank))
        found, is_known = _compare(own, base, request)
        counts.append(_sum_places(own, found, is_known))
        total, paired = total + len(own.key), paired + int(is_known.sum())
    joined = np.hstack(counts) if counts else np.zeros((3, 0), np.int64)
    note = f"{paired:,} of {format_count(total, 'tensor')} have a counterpart with a digest"
    return arrange_values(joined[0], joined[1], joined[2].astype(np.float64), note)


def _sum_places(
    own: _TensorColumns, found: npt.NDArray[np.bool_], is_known: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """Return rank, iteration and sum for each place that has a known tensor."""
    changes = (own.rank[1:] != own.rank[:-1]) | (own.iteration[1:] != own.iteration[:-1])
    starts = np.flatnonzero(np.append(len(own.key) > 0, changes))
    if not len(starts):
        return np.zeros((3, 0), np.int64)
    sums = [np.add.reduceat(each.astype(np.int64), starts) for each in (found, is_known)]
    return np.stack([own.rank[starts], own.iteration[starts], sums[0]])[:, sums[1] > 0]


def _make_condition(request: DifferenceRequest) -> tuple[str, list[object]]:
    conditions, values = match_rows(search=request.search)
    copies = [COPIES_CONDITION] if request.only_copies else []
    return " AND ".join(["iteration IS NOT NULL", *copies, *conditions]), values


def _iter_spans(source: DumpSource, request: DifferenceRequest) -> Iterator[_RowSpan]:
    """Yield the spans to read one after the other: several iterations, or several ranks of one
    iteration.
    """
    for first, last in _group_rows(_count_rows(source, request, "iteration", _EVERYTHING)):
        whole = _RowSpan(first, last, 0, MAX_NUMBER)
        if first < last:
            yield whole
            continue
        for ranks in _group_rows(_count_rows(source, request, "rank", whole)):
            yield _RowSpan(first, last, *ranks)


def _count_rows(
    source: DumpSource, request: DifferenceRequest, column: str, span: _RowSpan
) -> list[tuple[int, int]]:
    """Return the number of rows for each iteration, or for each rank, of a span."""
    condition, values = _make_condition(request)
    rows = source.get_rows(
        f"SELECT {column} AS place, count(*) AS n FROM tensors WHERE {_IN_SPAN} AND {condition} "
        "GROUP BY 1 ORDER BY 1",
        (*span, *values),
    )
    return [(row["place"], row["n"]) for row in rows]


def _group_rows(counts: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last place of groups of neighbours that do not have too many rows
    together.
    """
    first, last, held = None, 0, 0
    for place, count in counts:
        if first is not None and held + count > _MAX_ROWS:
            yield first, last
            first, held = None, 0
        first = place if first is None else first
        last, held = place, held + count
    if first is not None:
        yield first, last


def _read_columns(source: DumpSource, request: DifferenceRequest, span: _RowSpan) -> _TensorColumns:
    condition, values = _make_condition(request)
    table = source.read_table(_STATEMENT.format(condition), (*span, *values))
    found = {name: table.column(name).to_numpy() for name in table.column_names}
    rank, iteration = (found[name].astype(np.int64) for name in ("rank", "iteration"))
    key = found["key"] * _FACTORS[0] + iteration.astype(np.uint64) * _FACTORS[1]
    key = _add_numbers(key, rank)
    names = "digest", "has_digest", "fingerprint", "has_fingerprint"
    return _TensorColumns(rank, iteration, key, *(found[name] for name in names))


def _add_numbers(key: _Keys, rank: npt.NDArray[np.int64]) -> _Keys:
    """Return keys that include a number if a rank has the same key several times, so that the nth
    tensor corresponds to the nth.
    """
    own = key + rank.astype(np.uint64) * _FACTORS[2]
    order = np.argsort(own, kind="stable")
    ordered = own[order]
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])) if len(own) else order
    numbers = np.arange(len(own)) - np.repeat(starts, np.diff(np.append(starts, len(own))))
    made = np.empty_like(key)
    made[order] = key[order] + numbers.astype(np.uint64) * _FACTORS[0]
    return made


def _compare(
    own: _TensorColumns, base: _TensorColumns, request: DifferenceRequest
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return which tensors differ from their counterparts, and which have a counterpart that can be
    compared.
    """
    # If another tree is compared, the rank is a part of the key.
    keys = own.key, base.key
    chosen = np.arange(len(base.key))
    if request.base is not None:
        chosen = np.flatnonzero(base.rank == request.base)
    else:
        ranks = (each.rank.astype(np.uint64) * _FACTORS[2] for each in (own, base))
        keys = own.key + next(ranks), base.key + next(ranks)
    order = chosen[np.argsort(keys[1][chosen])]
    ordered = keys[1][order]
    if not len(ordered):
        nothing = np.zeros(len(own.key), np.bool_)
        return nothing, nothing
    at = np.minimum(np.searchsorted(ordered, keys[0]), len(ordered) - 1)
    partner = order[at]
    is_there = ordered[at] == keys[0]
    by_digest = is_there & own.has_digest & base.has_digest[partner]
    has_both = own.has_fingerprint & base.has_fingerprint[partner]
    by_fingerprint = is_there & ~by_digest & has_both
    differs = by_digest & (own.digest != base.digest[partner])
    differs |= by_fingerprint & (own.fingerprint != base.fingerprint[partner])
    return differs, by_digest | by_fingerprint
