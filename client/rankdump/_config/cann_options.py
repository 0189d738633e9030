"""Options that CANN's `acl.json` and TF Adapter's `DumpConfig` share: the grammar of `dump_step`,
of which every part is checked, and statistics instead of tensors (CANN, acl.json). Pure.
MindSpore's `iteration` looks like `dump_step`, but its parts are not checked.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from rankdump._core.plan import ContentSettings, IterationSelection
from rankdump._core.selection import parse_uint64

STEP_FORM = 'numbers and ranges without blanks as "0|5-8|100-120"'
MAX_STEP_PARTS = 100
_PART_PATTERN = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def parse_steps(text: str, *, strict: bool = False) -> IterationSelection:
    """Return the iterations that a text selects; ValueError names what is allowed.

    With `strict` a range must have more than one number.
    """
    parts = text.split("|")
    if len(parts) > MAX_STEP_PARTS:
        raise ValueError(f"at most {MAX_STEP_PARTS} parts, not {len(parts)}")
    return IterationSelection(text, tuple(_parse_span(part, strict=strict) for part in parts))


def _parse_span(part: str, *, strict: bool) -> tuple[int, int]:
    found = _PART_PATTERN.fullmatch(part)
    if found is None:
        raise ValueError(f"{STEP_FORM}, not {part[:40]!r}")
    low = _parse_number(found[1])
    high = low if found[2] is None else _parse_number(found[2])
    if low > high or (strict and found[2] is not None and low == high):
        order = "smaller than" if strict else "not greater than"
        raise ValueError(f"a range whose first number is {order} its last, not {part[:40]!r}")
    return low, high


def _parse_number(digits: str) -> int:
    number = parse_uint64(digits)
    if number is None:
        raise ValueError(f"numbers of at most 64 bits, not {digits[:40]!r}")
    return number


_DEFAULT_ITEMS = (
    "max",
    "min",
    "avg",
    "count",
    "nan count",
    "negative inf count",
    "positive inf count",
)
_ITEM_ORDER = (
    "max",
    "min",
    "avg",
    "nan count",
    "negative inf count",
    "positive inf count",
    "l2norm",
)


def make_cann_content(data: str, chosen: Collection[str] = ()) -> ContentSettings:
    """Return the content for `tensor` or `stats`; `chosen` are statistics by rankdump's names.

    The count of elements is always included: amid the default statistics, and before any others.
    """
    if data != "stats":
        return ContentSettings()
    columns = tuple(item for item in _ITEM_ORDER if item in chosen)
    default = not columns or {*columns, "count"} == {*_DEFAULT_ITEMS}
    items = _DEFAULT_ITEMS if default else ("count", *columns)
    return ContentSettings(saved="statistic", statistics=items, tables="operator")
