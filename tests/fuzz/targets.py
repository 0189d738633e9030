"""Every decoder of untrusted bytes, by the name of its folder in the corpus.

A target returns, or raises a RankdumpError: whatever else it raises is a defect, and so is memory
out of proportion to its input.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fuzz import (
    answers,
    black_boxes,
    damaged_rows,
    files,
    foreigns,
    naming,
    pages,
    plans,
    rings,
    streams,
    tables,
)

from rankdump.errors import RankdumpError

CORPUS = Path(__file__).parent / "corpus"

TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (
        streams.requests,
        streams.frames,
        streams.slabs,
        streams.old_slabs,
        rings.rings,
        rings.journals,
        streams.ledger,
        damaged_rows.sessions,
        damaged_rows.states,
        answers.reports,
        answers.answers,
        black_boxes.steps,
        black_boxes.raw_freezes,
        black_boxes.freezes,
        plans.plans,
        plans.dialects,
        naming.paths,
        naming.places,
        files.npys,
        files.packed,
        files.bins,
        files.manifests,
        files.cards,
        files.opdebugs,
        foreigns.archives,
        foreigns.flights,
        foreigns.foreigns,
        tables.statistics,
        tables.apis,
        tables.orders,
        tables.graphs,
        pages.pages,
    )
}


def fed(name: str, data: bytes) -> None:
    """Give a target bytes; what it may raise is not raised."""
    try:
        TARGETS[name](data)
    except RankdumpError:
        return


def kept(name: str) -> list[Path]:
    """Return the files of a target's corpus."""
    return sorted((CORPUS / name).iterdir())
