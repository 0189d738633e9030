"""Which calls of two programs stand for each other: anchors, and what lies between them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rankdump.diff.flow.anchors import anchors
from rankdump.diff.flow.gaps import cuts
from rankdump.diff.flow.values import FlowCall, Span


def match(a: Sequence[FlowCall], b: Sequence[FlowCall]) -> list[Span]:
    """Return what pairs, in order; every call of both sides is in exactly one span."""
    spans: list[Span] = []
    at_a, at_b = 0, 0
    for place_a, place_b in anchors(a, b):
        spans.extend(_between(a, b, range(at_a, place_a), range(at_b, place_b)))
        at_a, at_b = place_a + 1, place_b + 1
        spans.append(Span(range(place_a, at_a), range(place_b, at_b)))
    spans.extend(_between(a, b, range(at_a, len(a)), range(at_b, len(b))))
    return spans


def _between(
    a: Sequence[FlowCall], b: Sequence[FlowCall], inside_a: range, inside_b: range
) -> Iterator[Span]:
    """Yield the spans of what lies between two anchors."""
    if not inside_a or not inside_b:
        if inside_a or inside_b:
            yield Span(inside_a, inside_b)
        return
    found = cuts(
        a[inside_a.start : inside_a.stop],
        b[inside_b.start : inside_b.stop],
    )
    at_a, at_b = 0, 0
    for cut_a, cut_b in (*found, (len(inside_a), len(inside_b))):
        span = Span(inside_a[at_a:cut_a], inside_b[at_b:cut_b])
        at_a, at_b = cut_a, cut_b
        if span.a or span.b:
            yield span
