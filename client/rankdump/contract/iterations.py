"""The grammar of `iteration`: `all`, or numbers and ranges joined by `|`. Pure.

Facts: mindspore-dump.md 1.4. Only the characters are checked; a segment that no iteration can
match is accepted and left out.
"""

from __future__ import annotations

import re

from rankdump.contract.plan import Iterations

_CHARACTERS = re.compile(r"[0-9|-]+")
_SEGMENT = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_MAX_DIGITS = len(str((1 << 64) - 1))


def parse_iterations(text: str) -> Iterations | None:
    """Return the iterations a text means; None when MindSpore would refuse it."""
    if text == "all":
        return Iterations()
    if not _CHARACTERS.fullmatch(text):
        return None
    read = map(_read, text.split("|"))
    return Iterations(text, tuple(span for span in read if isinstance(span, tuple)))


def idle_segments(text: str) -> dict[str, str]:
    """Return the segments of an accepted text that match no iteration, each with the reason."""
    if text == "all":
        return {}
    read = ((segment, _read(segment)) for segment in text.split("|"))
    return {segment: found for segment, found in read if isinstance(found, str)}


def _read(segment: str) -> tuple[int, int] | str:
    """Return a segment's span, or why it has none."""
    if not segment:
        return "is an empty segment"
    found = _SEGMENT.fullmatch(segment)
    if found is None:
        return "is neither a number nor a range"
    low = _number(found[1])
    high = low if found[2] is None else _number(found[2])
    if low is None or high is None:
        return "has a number over 64 bits"
    return (low, high) if low <= high else "runs backwards"


def _number(digits: str) -> int | None:
    significant = digits.lstrip("0") or "0"
    if len(significant) > _MAX_DIGITS:
        return None
    number = int(significant)
    return number if number < 1 << 64 else None
