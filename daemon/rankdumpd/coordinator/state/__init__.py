"""One SQLite file per coordinator: what stands here, agents may forget."""

from __future__ import annotations

import os
import sqlite3
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rankdump.contract.errors import DamagedError, RankdumpError, UnavailableError
from rankdumpd.coordinator.kept import Row
from rankdumpd.coordinator.state.connection import connect, sole_owner
from rankdumpd.coordinator.state.rows import TABLES, Values, checked
from rankdumpd.coordinator.state.tables import OF_A_JOB


class State:
    """The file, for one thread at a time."""

    def __init__(self, state_dir: Path) -> None:
        self._guard = sole_owner(state_dir)
        self.path = state_dir / "coordinator.sqlite"
        try:
            self._base = connect(self.path)
        except RankdumpError:
            os.close(self._guard)
            raise

    def close(self) -> None:
        """Let another process have the file; may be repeated."""
        if self._guard >= 0:
            self._base.close()
            os.close(self._guard)
            self._guard = -1

    def rows(self) -> Iterator[Row]:
        """Return all that is kept: agents first, what others build upon before them.

        DamagedError when the file is not as it was written.
        """
        try:
            for table in TABLES.values():
                for values in self._base.execute(table.read):
                    yield checked(table.row(*values))
        except (sqlite3.Error, ValueError, TypeError, LookupError, AttributeError) as error:
            raise DamagedError(f"coordinator.sqlite cannot be read: {error}") from None

    def write(self, rows: Iterable[Row]) -> None:
        """Write all of the rows, or none of them and raise UnavailableError."""
        by_kind: defaultdict[type[Row], list[Values]] = defaultdict(list)
        for row in rows:
            by_kind[type(row)].append(TABLES[type(row)].values(row))
        if by_kind:
            self._change([(TABLES[kind].write, values) for kind, values in by_kind.items()])

    def forget(self, job_id: str) -> None:
        """Forget a job, and give back the room that it took; UnavailableError when it cannot be."""
        values: list[Values] = [(job_id,)]
        self._change([(f"DELETE FROM {table} WHERE job_id = ?", values) for table in OF_A_JOB])
        with _explained():
            # As a script, which goes on to the end: each step of it frees one page.
            self._base.executescript("PRAGMA incremental_vacuum; PRAGMA wal_checkpoint(TRUNCATE);")

    def forget_agents(self, agent_ids: Iterable[str]) -> None:
        """Forget agents; UnavailableError when they cannot be."""
        values: list[Values] = [(agent_id,) for agent_id in agent_ids]
        self._change([("DELETE FROM agents WHERE agent_id = ?", values)])

    @property
    def size_bytes(self) -> int:
        """What all rows take on disk."""
        ((size,),) = self._base.execute(
            "SELECT (c.page_count - f.freelist_count) * s.page_size"
            " FROM pragma_page_count c, pragma_freelist_count f, pragma_page_size s"
        )
        return size

    def _change(self, statements: list[tuple[str, list[Values]]]) -> None:
        base = self._base
        with _explained():
            base.execute("BEGIN IMMEDIATE")
            try:
                for statement, values in statements:
                    base.executemany(statement, values)
                base.execute("COMMIT")
            except BaseException:
                if base.in_transaction:
                    base.execute("ROLLBACK")
                raise


@contextmanager
def _explained() -> Generator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise UnavailableError(f"coordinator.sqlite cannot be written: {error}") from None
