"""The classes of `kernels`: regular expression, full scope name, operator type. Pure.

Facts: mindspore-dump.md 1.7. One fault of MindSpore is left behind: it doubles the backslashes of
a regular expression, so that `[0-9]` works and `\\d` never does; here both do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from rankdump.contract.dialect.expression import translated
from rankdump.contract.plan import MAX_PATTERN, MAX_PATTERNS, Operators

Warn = Callable[[object, str], None]
"""Takes an entry and a phrase about it."""

_REGEX_HEAD, _REGEX_TAIL = "name-regex(", ")"
_CALL = re.compile(r"-op[0-9]+(?:_[0-9]+)?$")
_NOTHING = "selects nothing, as in 2.3; from 2.5 on MindSpore takes it for every operator"
_EVERYTHING = "selects every operator, as in MindSpore 2.0 and from 2.5 on"


def parse_kernels(items: Sequence[object], warn: Warn) -> Operators:
    """Return the operators these entries name; ValueError says which expression is invalid."""
    names: dict[str, None] = {}
    types: dict[str, None] = {}
    patterns: dict[str, None] = {}
    for item in items:
        entry = _entry(item, warn)
        if not entry:
            continue
        if entry.startswith(_REGEX_HEAD) and entry.endswith(_REGEX_TAIL):
            into, kept = patterns, _pattern(entry, warn)
        elif "/" in entry or "-op" in entry:
            into, kept = names, _full_name(entry, warn)
        else:
            into, kept = types, _type(entry, warn)
        if kept in into:
            warn(item, "stands there twice and counts once")
        into[kept] = None
    if len(patterns) > MAX_PATTERNS:
        raise ValueError(f"{len(patterns)} of them: at most {MAX_PATTERNS}")
    empty = not (names or types or patterns)
    if empty:
        warn(list(items), _EVERYTHING if items else _NOTHING)
    return Operators(
        everything=empty and bool(items),
        names=tuple(names),
        types=tuple(types),
        patterns=tuple(patterns),
    )


def _entry(item: object, warn: Warn) -> str:
    """Return an element as MindSpore sees it: as text, without quotes and blanks."""
    compact = (",", ":")
    text = (
        item
        if isinstance(item, str)
        else json.dumps(item, separators=compact, sort_keys=True, ensure_ascii=False)
    )
    entry = text.replace('"', "").replace(" ", "")
    if entry and entry != item:
        warn(item, f"is read as {entry!r}: every entry is text without quotes and blanks")
    return entry


def _pattern(entry: str, warn: Warn) -> str:
    pattern = entry[len(_REGEX_HEAD) : -len(_REGEX_TAIL)]
    if "\\" in pattern:
        warn(entry, "has a backslash: MindSpore doubles it and matches nothing, rankdump does not")
    if len(found := translated(pattern)) > MAX_PATTERN:
        raise ValueError(f"one of {len(found)} characters: at most {MAX_PATTERN}")
    return found


def _full_name(entry: str, warn: Warn) -> str:
    if entry.casefold().startswith(_REGEX_HEAD):
        warn(entry, f"is no expression but a name: one is written {_REGEX_HEAD}...{_REGEX_TAIL}")
    elif "/" not in entry:
        warn(entry, "is taken for a full name, which begins with its scope, such as Default/...")
    elif not _CALL.search(entry):
        warn(entry, "is taken for a full name, which ends in a number, such as -op0")
    return entry


def _type(entry: str, warn: Warn) -> str:
    if entry.casefold().startswith(_REGEX_HEAD):
        warn(entry, f"is no expression but a type: one is written {_REGEX_HEAD}...{_REGEX_TAIL}")
    if entry.casefold() == "parameter":
        warn(entry, "matches no parameter: those go by their own names, such as conv1.weight")
    return entry
