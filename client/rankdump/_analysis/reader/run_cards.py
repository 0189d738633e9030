"""Run cards of a tree, read from the ends of its manifests. A card that cannot be read becomes a
sentence about the problem; the other cards are read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rankdump._analysis.reader.manifests import (
    find_other_sessions,
    list_tree_manifests,
    read_balance,
    read_manifests,
)
from rankdump._core.manifest import find_card
from rankdump._core.run_card import MAX_CARD_BYTES, RunCard, parse_card
from rankdump.errors import CorruptedError

_END_BYTES = (1 << 13, 8 * MAX_CARD_BYTES)
"""Numbers of bytes to read from the end of a manifest: nearly all cards fit into the first number,
and an escaped text may take six times its bytes.
"""
_MAX_PROBLEMS = 3


@dataclass(frozen=True, slots=True)
class RankCard:
    """The run card of an iteration of a rank."""

    rank: int
    iteration: int
    attempt: int
    card: RunCard


class FoundCards(NamedTuple):
    """The run cards of a tree."""

    cards: tuple[RankCard, ...]
    """Run cards sorted by rank and iteration; if there are several attempts, the last
    one counts.
    """
    problems: tuple[str, ...]
    """Sentences about run cards that cannot be read."""
    without: int
    """Number of manifests that have no run card."""
    unread: tuple[str, ...] = ()
    """Sentences about manifests that cannot be read."""


def read_run_cards(
    root: Path,
    keeps: Callable[[int, int], bool] = lambda rank, iteration: True,
    *,
    job_id: str = "",
    attempt: int | None = None,
) -> FoundCards:
    """Return the run cards of a job and attempt, for the ranks and iterations that `keeps` selects.

    Ranks and iterations are taken from the names of manifests, so other manifests are not opened.
    """
    others = find_other_sessions(root, job_id, attempt)
    found: dict[tuple[int, int], RankCard] = {}
    problems, unread = list[str](), list[str]()
    without = 0
    for file in list_tree_manifests(root):
        may_keep = file.iteration is None or file.rank is None or keeps(file.rank, file.iteration)
        if file.session in others or not may_keep:
            continue
        status = next((m.status for m in read_manifests([file], unread, read_balance)), None)
        if status is None or not keeps(status.rank, status.iteration):
            continue
        place = status.rank, status.iteration
        try:
            data = _read_card(file.path)
            if not data:
                without += 1
            elif place not in found or found[place].attempt <= status.attempt:
                found[place] = RankCard(*place, status.attempt, parse_card(data))
        except (OSError, CorruptedError) as error:
            problems.append(f"rank {place[0]}, iteration {place[1]}: {error}")
    cards = tuple(found[place] for place in sorted(found))
    return FoundCards(cards, _shorten(problems), without, tuple(unread))


def read_model_names(root: Path) -> dict[int, str]:
    """Return the names of the models that a rank attached, by number; empty if no card has them.
    Reads the newest manifest of the first rank that has run cards.
    """
    newest = {file.session[0]: file.path for file in list_tree_manifests(root)}
    for path in newest.values():
        with suppress(OSError, CorruptedError):
            data = _read_card(path)
            if data:
                return {graph: each.name for graph, each in enumerate(parse_card(data).models)}
    return {}


def _read_card(path: Path) -> bytes:
    """Return the run card in a manifest as JSON; empty if there is none."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        for count in _END_BYTES:
            card = find_card(os.pread(descriptor, count, max(0, size - count)))
            if card is not None:
                return card
    finally:
        os.close(descriptor)
    raise CorruptedError("run card cannot be read: its begin is not found")


def _shorten(problems: list[str]) -> tuple[str, ...]:
    left = len(problems) - _MAX_PROBLEMS
    more = [f"... and {left:,} more run cards that cannot be read"] if left > 0 else []
    return (*problems[:_MAX_PROBLEMS], *more)
