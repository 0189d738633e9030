"""Figures in the place of tensors, as CANN's `dump_data` and `dump_stats` ask for them. Pure.

Facts: ascend-formats.md 4.6.
"""

from __future__ import annotations

from collections.abc import Collection

from rankdump.contract.plan import Content

_DEFAULT = ("max", "min", "avg", "count", "nan count", "negative inf count", "positive inf count")
_COLUMNS = ("max", "min", "avg", "nan count", "negative inf count", "positive inf count", "l2norm")


def content_of(data: str, chosen: Collection[str] = ()) -> Content:
    """Return what `tensor` or `stats` keeps; `chosen` are figures by rankdump's names for them.

    The number of elements is always there: amid the default figures, and before any others.
    """
    if data != "stats":
        return Content()
    columns = tuple(item for item in _COLUMNS if item in chosen)
    default = not columns or {*columns, "count"} == {*_DEFAULT}
    items = _DEFAULT if default else ("count", *columns)
    return Content(saved="statistic", statistics=items, tables="operator")
