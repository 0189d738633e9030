"""Pairs of names that a person chose to be one, as an address holds them and as the file that
`rankdump diff --map` reads. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from rankdump._analysis.compare.call_names import parse_name_mapping
from rankdump._web.page_parameters import MAX_TEXT, PageParameters, ParameterError
from rankdump.errors import ConfigError

NamePairs: TypeAlias = "tuple[tuple[str, str], ...]"
"""Names of a with those of b."""
_FORM = "a JSON object of names of a with names of b, or lines name_a,name_b"
_FULL = (
    f"pairs of together {MAX_TEXT:,} characters: download the mapping, and use rankdump diff --map"
)


class PairChoice(NamedTuple):
    """Pairs, and the name of one side that has no partner yet."""

    pairs: NamePairs
    pick_a: str
    pick_b: str


def parse_pairs(parameters: PageParameters) -> PairChoice:
    """Return the choice of an address: names that are picked on both sides are a pair, and `drop`
    is the number of a pair that is not one any more.
    """
    pairs = _parse_text(parameters.read_text("pairs"))
    pick_a, pick_b = parameters.read_text("pick_a"), parameters.read_text("pick_b")
    dropped = parameters.read_number("drop", high=MAX_TEXT)
    pairs = tuple(pair for at, pair in enumerate(pairs) if at != dropped)
    if not (pick_a and pick_b):
        return PairChoice(pairs, pick_a, pick_b)
    others = (pair for pair in pairs if pair[0] != pick_a and pair[1] != pick_b)
    pairs = (*others, (pick_a, pick_b))
    if len(format_pairs(pairs)) > MAX_TEXT:
        raise ParameterError("pick_a", pick_a, _FULL)
    return PairChoice(pairs, "", "")


def _parse_text(text: str) -> NamePairs:
    try:
        found = parse_name_mapping("pairs", text)
        _ = [name.encode() for pair in found.items() for name in pair]  # JSON has surrogates
        return tuple(found.items())
    except (ConfigError, UnicodeEncodeError):
        raise ParameterError("pairs", text, _FORM) from None


def format_pairs(pairs: Sequence[tuple[str, str]]) -> str:
    """Return the pairs for an address; empty for none."""
    return json.dumps(dict(pairs), separators=(",", ":")) if pairs else ""


def format_mapping_file(pairs: Sequence[tuple[str, str]]) -> bytes:
    """Return the file that `rankdump diff --map` reads."""
    return f"{json.dumps(dict(pairs), indent=1)}\n".encode()
