"""Element types and formats of CANN in the words of listings. Pure."""

from __future__ import annotations

from rankdump.contract.dump_types import DATA_TYPES

_PREFIX = "DT_"
_BY_NAME = {kind.name: kind for kind in DATA_TYPES.values()}


def element_of(number: int) -> str:
    """Return the name of an element type: numpy's where there is one, else CANN's."""
    known = DATA_TYPES.get(number)
    return (known.element or known.name.lower()) if known else f"type {number}"


def element_named(text: str) -> str:
    """Return the same for the text of a table, which has CANN's name or the framework's."""
    known = _BY_NAME.get(text.removeprefix(_PREFIX)) if text.startswith(_PREFIX) else None
    return element_of(known.number) if known else text
