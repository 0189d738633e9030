"""Many records into their table at once."""

from __future__ import annotations

import sqlite3
from itertools import chain

from rankdumpd.agent import rows

_INSERTED_AT_ONCE = 64
_PLACES_AT_ONCE = ", ".join([rows.RECORD_PLACES] * _INSERTED_AT_ONCE)


def insert_records(base: sqlite3.Connection, records: list[tuple[str | int, ...]]) -> None:
    """Insert rows of records; a number that stands there already stays as it is."""
    # Some at a time: every step of SQLite lets go of the interpreter, and taking it back from
    # threads that are busy costs more than the row.
    whole = len(records) // _INSERTED_AT_ONCE * _INSERTED_AT_ONCE
    query = "INSERT OR IGNORE INTO records VALUES "
    for first in range(0, whole, _INSERTED_AT_ONCE):
        some = records[first : first + _INSERTED_AT_ONCE]
        base.execute(query + _PLACES_AT_ONCE, list(chain.from_iterable(some)))
    base.executemany(query + rows.RECORD_PLACES, records[whole:])
