"""The classes of `kernels`: regular expression, full scope name, operator type. Pure.

Facts: mindspore-dump.md 1.7. One fault of MindSpore is left behind: it doubles the backslashes of
a regular expression, so that `[0-9]` works and `\\d` never does; here both do.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Sequence

from rankdump.contract.plan import Operators

_REGEX_HEAD, _REGEX_TAIL = "name-regex(", ")"


def parse_kernels(items: Sequence[object]) -> Operators:
    """Return the operators these entries name; ValueError says which expression is invalid."""
    names: dict[str, None] = {}
    types: dict[str, None] = {}
    patterns: dict[str, None] = {}
    for entry in filter(None, map(_entry, items)):
        if entry.startswith(_REGEX_HEAD) and entry.endswith(_REGEX_TAIL):
            patterns[_checked(entry[len(_REGEX_HEAD) : -len(_REGEX_TAIL)])] = None
        elif "/" in entry or "-op" in entry:
            names[entry] = None
        else:
            types[entry] = None
    return Operators(
        everything=False, names=tuple(names), types=tuple(types), patterns=tuple(patterns)
    )


def _entry(item: object) -> str:
    """Return an element as MindSpore sees it: as text, without quotes and blanks."""
    compact = (",", ":")
    text = (
        item
        if isinstance(item, str)
        else json.dumps(item, separators=compact, sort_keys=True, ensure_ascii=False)
    )
    return text.replace('"', "").replace(" ", "")


def _checked(pattern: str) -> str:
    try:
        with warnings.catch_warnings():
            # Where re warns, it reads a pattern in another way than ECMAScript does.
            warnings.simplefilter("error")
            re.compile(pattern)
    except (re.error, Warning, OverflowError, RecursionError) as error:
        raise ValueError(f"{pattern!r}: {error}") from None
    return pattern
