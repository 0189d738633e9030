r"""Entries of `kernels` in MindSpore's configuration: regular expression, full scope name, or
operator type (MindSpore 2.3, Dump guide). Pure.

Expressions are those of MindSpore's `std::regex`, translated to Python's `re`. Both accept nearly
the same language: POSIX classes are expanded; constructs that only Python accepts, such as `(?i)`
or named groups, are rejected, because MindSpore rejects them too. One defect of MindSpore is not
copied: it doubles the backslashes of a regular expression, so that `[0-9]` works but `\\d` never
does; here both work.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence

from rankdump._core.plan import MAX_PATTERN_CHARACTERS, MAX_PATTERNS, OperatorSelection

_POSIX_CLASSES = {
    "alpha": "A-Za-z",
    "digit": "0-9",
    "d": "0-9",
    "alnum": "0-9A-Za-z",
    "w": "0-9A-Z_a-z",
    "upper": "A-Z",
    "lower": "a-z",
    "xdigit": "0-9A-Fa-f",
    "punct": r"!-/:-@\[-`{-~",
    "space": r" \t-\r",
    "s": r" \t-\r",
    "blank": r" \t",
    "cntrl": r"\x00-\x1f\x7f",
    "graph": "!-~",
    "print": " -~",
}
_ESCAPE_FORM = r"\\(?:[dDsSwWbBtnrfv0]|[1-9][0-9]*|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|[^0-9A-Za-z])"
_MEMBER_FORM = rf"\[:[A-Za-z]+:\]|\[(?![:.=])|{_ESCAPE_FORM}|[^\[\]\\]"
_TOKEN_PATTERN = re.compile(
    rf"""
    \[(?P<not>\^?)(?P<set>(?:{_MEMBER_FORM})*)\]
    | {_ESCAPE_FORM}
    | \((?!\?) | \(\?[:=!] | \)
    | (?:[*+?]|\{{[0-9]+(?:,[0-9]*)?\}})\??(?![*+?{{])  # a quantifier, and no second one
    | [^\\\[({{)*+?]
    """,
    re.VERBOSE | re.DOTALL,
)
_MEMBER_PATTERN = re.compile(_MEMBER_FORM, re.DOTALL)


def translate_expression(pattern: str) -> str:
    """Return the expression in the syntax of Python's `re`; ValueError names what cannot be
    translated.
    """
    try:
        translation = "".join(_translate_tokens(pattern))
        with warnings.catch_warnings():
            # If `re` warns, it interprets the expression in another way than ECMAScript.
            warnings.simplefilter("error")
            re.compile(translation)
    except (ValueError, re.error, Warning, OverflowError, RecursionError) as error:
        raise ValueError(f"{pattern!r}: {error}") from None
    return translation


def _translate_tokens(pattern: str) -> Iterator[str]:
    at = 0
    while at < len(pattern):
        token = _TOKEN_PATTERN.match(pattern, at)
        if token is None:
            rest = pattern[at : at + 10]
            raise ValueError(f"{rest!r} at character {at} is not ECMAScript")
        yield token[0] if token["set"] is None else _translate_set(token["not"], token["set"])
        at = token.end()


def _translate_set(negation: str, body: str) -> str:
    members: list[str] = _MEMBER_PATTERN.findall(body)
    if not members:
        return r"[\s\S]" if negation else r"(?!)"
    parts: list[str] = []
    at = 0
    while at < len(members):
        ends = members[at : at + 3]
        if len(ends) == 3 and ends[1] == "-":
            parts.append(f"{_translate_range_end(ends[0])}-{_translate_range_end(ends[2])}")
            at += 3
        else:
            parts.append(_translate_member(members[at]))
            at += 1
    return f"[{negation}{''.join(parts)}]"


def _translate_member(member: str) -> str:
    if member.startswith("[:"):
        name = member[2:-2].lower()
        if name not in _POSIX_CLASSES:
            raise ValueError(
                f"{member!r} is not a character class; known: {', '.join(_POSIX_CLASSES)}"
            )
        return _POSIX_CLASSES[name]
    # `re` warns about these characters if they are doubled or come first, because it may give them
    # a meaning some day.
    return "\\" + member if member in "[&~|-^" else member


def _translate_range_end(member: str) -> str:
    if member.startswith("[:"):
        raise ValueError(f"{member!r} cannot end a range")
    return _translate_member(member)


WarningCallback = Callable[[object, str], None]
"""Receives an entry and a phrase about it."""

_REGEX_HEAD, _REGEX_TAIL = "name-regex(", ")"
_EXPRESSION_MARKS = re.compile(r"[*+?^$|(){}\[\]\\]")
"""Characters of expressions that no name of an operator and no type has."""
_CALL_SUFFIX = re.compile(r"-op[0-9]+(?:_[0-9]+)?$")
_SELECTS_NOTHING = "selects nothing, as in 2.3; from 2.5 on MindSpore takes it for every operator"
_SELECTS_EVERYTHING = "selects every operator, as in MindSpore 2.0 and from 2.5 on"


def parse_operator_patterns(items: Sequence[object], warn: WarningCallback) -> OperatorSelection:
    """Return the operators that the entries select; ValueError names an invalid expression."""
    names: dict[str, None] = {}
    types: dict[str, None] = {}
    patterns: dict[str, None] = {}
    for item in items:
        entry = _normalize_entry(item, warn)
        if not entry:
            continue
        if entry.startswith(_REGEX_HEAD) and entry.endswith(_REGEX_TAIL):
            into, kept = patterns, _parse_pattern(entry, warn)
        elif "/" in entry or "-op" in entry:
            into, kept = names, _check_full_name(entry, warn)
        else:
            into, kept = types, _check_type(entry, warn)
        if kept in into:
            warn(item, "is listed twice and counts once")
        into[kept] = None
    if len(patterns) > MAX_PATTERNS:
        raise ValueError(f"{len(patterns)} patterns: at most {MAX_PATTERNS} are allowed")
    empty = not (names or types or patterns)
    if empty:
        warn(list(items), _SELECTS_EVERYTHING if items else _SELECTS_NOTHING)
    return OperatorSelection(
        everything=empty and bool(items),
        names=tuple(names),
        types=tuple(types),
        patterns=tuple(patterns),
    )


def _normalize_entry(item: object, warn: WarningCallback) -> str:
    """Return an entry as MindSpore reads it: as text, without quotes and blanks."""
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


def _parse_pattern(entry: str, warn: WarningCallback) -> str:
    pattern = entry[len(_REGEX_HEAD) : -len(_REGEX_TAIL)]
    if "\\" in pattern:
        warn(entry, "has a backslash: MindSpore doubles it and matches nothing, rankdump does not")
    if len(found := translate_expression(pattern)) > MAX_PATTERN_CHARACTERS:
        raise ValueError(
            f"a pattern of {len(found)} characters: at most {MAX_PATTERN_CHARACTERS} are allowed"
        )
    return found


def _check_full_name(entry: str, warn: WarningCallback) -> str:
    if _EXPRESSION_MARKS.search(entry):
        warn(entry, f"is a name, not an expression, which is written {_REGEX_HEAD}...{_REGEX_TAIL}")
    elif "/" not in entry:
        warn(entry, "is read as a full name, which begins with its scope, such as Default/...")
    elif not _CALL_SUFFIX.search(entry):
        warn(entry, "is read as a full name, which ends in a number, such as -op0")
    return entry


def _check_type(entry: str, warn: WarningCallback) -> str:
    if _EXPRESSION_MARKS.search(entry):
        warn(entry, f"is a type, not an expression, which is written {_REGEX_HEAD}...{_REGEX_TAIL}")
    if entry.casefold() == "parameter":
        warn(
            entry, "matches no parameter: parameters have names of their own, such as conv1.weight"
        )
    return entry
