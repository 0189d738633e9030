"""The grammar of `dump_step`: numbers and ranges joined by `|`, every part checked. Pure.

Facts: ascend-formats.md 4.3. `iteration` of a `data_dump.json` looks the same, but there nobody
checks the parts.
"""

from __future__ import annotations

import re

from rankdump.contract.plan import Iterations

FORM = 'numbers and ranges without blanks as "0|5-8|100-120"'
MAX_PARTS = 100
_PART = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_MAX_DIGITS = 20


def parse_steps(text: str, *, strict: bool = False) -> Iterations:
    """Return the iterations a text means; ValueError says what may stand there.

    With `strict` a range has to have more than one number.
    """
    parts = text.split("|")
    if len(parts) > MAX_PARTS:
        raise ValueError(f"at most {MAX_PARTS} parts, not {len(parts)}")
    return Iterations(text, tuple(_span(part, strict=strict) for part in parts))


def _span(part: str, *, strict: bool) -> tuple[int, int]:
    found = _PART.fullmatch(part)
    if found is None:
        raise ValueError(f"{FORM}, not {part[:40]!r}")
    low = _number(found[1])
    high = low if found[2] is None else _number(found[2])
    if low > high or (strict and found[2] is not None and low == high):
        order = "smaller than" if strict else "not greater than"
        raise ValueError(f"a range whose first number is {order} its last, not {part[:40]!r}")
    return low, high


def _number(digits: str) -> int:
    significant = digits.lstrip("0") or "0"
    if len(significant) > _MAX_DIGITS or int(significant) >= 1 << 64:
        raise ValueError(f"numbers of at most 64 bits, not {digits[:40]!r}")
    return int(significant)
