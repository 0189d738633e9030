"""Regular expressions as MindSpore's `std::regex` reads them, in the words of Python's `re`. Pure.

Both know nearly the same language. POSIX classes are spelt out; what only Python knows, such as
`(?i)` or named groups, is refused, because MindSpore refuses it too.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator

_POSIX = {
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
_ESCAPE = r"\\(?:[dDsSwWbBtnrfv0]|[1-9][0-9]*|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|[^0-9A-Za-z])"
_MEMBER = rf"\[:[A-Za-z]+:\]|\[(?![:.=])|{_ESCAPE}|[^\[\]\\]"
_TOKEN = re.compile(
    rf"""
    \[(?P<not>\^?)(?P<set>(?:{_MEMBER})*)\]
    | {_ESCAPE}
    | \((?!\?) | \(\?[:=!] | \)
    | (?:[*+?]|\{{[0-9]+(?:,[0-9]*)?\}})\??(?![*+?{{])  # a quantifier, and no second one
    | [^\\\[({{)*+?]
    """,
    re.VERBOSE | re.DOTALL,
)
_MEMBERS = re.compile(_MEMBER, re.DOTALL)


def translated(pattern: str) -> str:
    """Return what Python matches in the same way; ValueError says what cannot be read."""
    try:
        translation = "".join(_python(pattern))
        with warnings.catch_warnings():
            # Where re warns, it reads an expression in another way than ECMAScript does.
            warnings.simplefilter("error")
            re.compile(translation)
    except (ValueError, re.error, Warning, OverflowError, RecursionError) as error:
        raise ValueError(f"{pattern!r}: {error}") from None
    return translation


def _python(pattern: str) -> Iterator[str]:
    at = 0
    while at < len(pattern):
        token = _TOKEN.match(pattern, at)
        if token is None:
            rest = pattern[at : at + 10]
            raise ValueError(f"{rest!r} at character {at} is not ECMAScript")
        yield token[0] if token["set"] is None else _set(token["not"], token["set"])
        at = token.end()


def _set(negation: str, body: str) -> str:
    members: list[str] = _MEMBERS.findall(body)
    if not members:
        return r"[\s\S]" if negation else r"(?!)"
    parts: list[str] = []
    at = 0
    while at < len(members):
        ends = members[at : at + 3]
        if len(ends) == 3 and ends[1] == "-":
            parts.append(f"{_end_of_range(ends[0])}-{_end_of_range(ends[2])}")
            at += 3
        else:
            parts.append(_member(members[at]))
            at += 1
    return f"[{negation}{''.join(parts)}]"


def _member(member: str) -> str:
    if member.startswith("[:"):
        name = member[2:-2].lower()
        if name not in _POSIX:
            raise ValueError(f"{member!r} is no class; there are {', '.join(_POSIX)}")
        return _POSIX[name]
    # Doubled or in front these warn in re, which may read them in another way one day.
    return "\\" + member if member in "[&~|-^" else member


def _end_of_range(member: str) -> str:
    if member.startswith("[:"):
        raise ValueError(f"{member!r} cannot end a range")
    return _member(member)
