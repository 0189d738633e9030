"""Text of tolerances by name, as options and pages have it: `PATTERN=ERROR`. Pure."""

from __future__ import annotations

from collections.abc import Iterable

ROUNDING = "rounding"
"""A tolerance that is the error of rounding."""
TOLERANCE_FORM = f"PATTERN=ERROR, such as '*norm*=1e-3' or '*norm*={ROUNDING}'"


def parse_tolerances(texts: Iterable[str]) -> dict[str, float | str]:
    """Return errors, or `rounding`, by patterns; a later one of a pattern holds.

    ValueError has the text that is not allowed.

    >>> parse_tolerances(["*norm*=1e-3", "*=rounding"])
    {'*norm*': 0.001, '*': 'rounding'}
    """
    found: dict[str, float | str] = {}
    for text in texts:
        pattern, sign, value = text.rpartition("=")
        if not sign or not pattern:
            raise ValueError(text)
        found.pop(pattern, None)
        try:
            found[pattern] = value if value == ROUNDING else float(value)
        except ValueError:
            raise ValueError(text) from None
    return found
