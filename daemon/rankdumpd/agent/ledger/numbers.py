"""Numbers of what the coordinator is told: one is never given to two items, whatever was lost.

A power loss takes the last commits with it, and with them numbers that the coordinator has heard.
"""

from __future__ import annotations

import sqlite3

GAP = 1 << 32
"""More items than can be lost with one process; there is room for two billion gaps."""

_SET = "UPDATE sqlite_sequence SET seq = ? WHERE name = 'log'"


def leave_a_gap(base: sqlite3.Connection) -> None:
    """Go on behind any number that an earlier process can have given; to be synced."""
    newest = _newest(base)
    if newest:
        base.execute(_SET, (newest + GAP,))


def begin_after(base: sqlite3.Connection, number: int) -> int:
    """Move all items behind a number that is higher than any; return how many that were."""
    newest = _newest(base)
    if newest >= number:
        return 0
    if not newest:
        base.execute("INSERT INTO sqlite_sequence VALUES ('log', 0)")
    # In their order, and all at once: no other item has the number that one gets.
    moved = base.execute("UPDATE log SET number = number + ?", (number,)).rowcount
    base.execute(_SET, (number + newest,))
    return moved


def _newest(base: sqlite3.Connection) -> int:
    found = base.execute("SELECT seq FROM sqlite_sequence WHERE name = 'log'").fetchone()
    return found[0] if found else 0
