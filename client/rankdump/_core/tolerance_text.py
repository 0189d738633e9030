"""Text form of tolerances by name, `PATTERN=ERROR`, as options and pages have it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

ROUNDING = "rounding"
"""Word for a tolerance that allows only the error of rounding."""
TOLERANCE_FORM = f"PATTERN=ERROR, such as '*norm*=1e-3' or '*norm*={ROUNDING}'"


def parse_tolerances(texts: Iterable[str]) -> dict[str, float | str]:
    """Return the allowed error, or `rounding`, of each pattern; the last value of a pattern counts.

    ValueError quotes the text that is not allowed.

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
