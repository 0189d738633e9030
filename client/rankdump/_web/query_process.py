"""Process that runs the statements of people. DuckDB may not notice that its time is over, and does
not count a single huge value, so the process has a memory limit and is killed when it takes too
long.
"""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from rankdump._core.pandas_blocker import leave_pandas_out
from rankdump._web.limited_process import LimitedProcess, limit_address_space
from rankdump.errors import ExhaustedError, QueryError, RankdumpError, UnavailableError

TIMEOUT_S = 20.0
MEMORY_BYTES = 512 << 20
MAX_ROWS = 1000
"""Largest number of rows that are sent back."""
_GRACE_S = 2.0
_NO_MEMORY = "the query needs more memory than a page may use"


class QueryAnswer(NamedTuple):
    """Rows of a statement."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    row_count: int
    """Number of all rows, of which only MAX_ROWS are sent."""


class QueryProcess:
    """Starts the process for the first statement; runs one statement at a time."""

    def __init__(self, *, timeout_s: float = TIMEOUT_S, memory_bytes: int = MEMORY_BYTES) -> None:
        self._timeout_s, self._memory_bytes = timeout_s, memory_bytes
        self._lock = threading.Lock()
        self._process: LimitedProcess | None = None

    def run(self, root: Path, sql: str) -> QueryAnswer:
        """Return the rows of one SELECT over a tree.

        QueryError for a statement that is rejected or takes too long, ExhaustedError when it needs
        more memory, UnavailableError when another statement takes too long.
        """
        if not self._lock.acquire(timeout=self._timeout_s):
            raise UnavailableError("other queries are running: try again")
        try:
            pipe = self._start()
            pipe.send((str(root), sql))
            if not pipe.poll(self._timeout_s + _GRACE_S):
                self._stop()
                raise QueryError(f"the query took longer than {self._timeout_s:g} s")
            answer = pipe.recv()
        except (EOFError, OSError):
            self._stop()
            raise ExhaustedError(_NO_MEMORY) from None
        finally:
            self._lock.release()
        if isinstance(answer, RankdumpError):
            raise answer
        return answer

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._stop()

    def _start(self) -> Connection:
        if self._process is None or not self._process.is_alive:
            self._stop()
            self._process = LimitedProcess(serve_queries, self._timeout_s, self._memory_bytes)
        return self._process.pipe

    def _stop(self) -> None:
        if self._process is not None:
            self._process.stop()
        self._process = None


def serve_queries(pipe: Connection, timeout_s: float, memory_bytes: int) -> None:
    """Answer statements until the other side closes the pipe."""
    leave_pandas_out()
    # Imported before the limit is set; otherwise the memory of their code would count against it.
    import duckdb as _duckdb
    import pyarrow as _pyarrow

    _ = _duckdb, _pyarrow
    limit_address_space(memory_bytes)
    while True:
        try:
            root, sql = pipe.recv()
        except EOFError:
            return
        pipe.send(_answer(Path(root), sql, timeout_s, memory_bytes))


def _answer(
    root: Path, sql: str, timeout_s: float, memory_bytes: int
) -> QueryAnswer | RankdumpError:
    from rankdump._analysis.reader.dump import open_dump
    from rankdump._analysis.table.table_query import QueryLimits

    try:
        found = open_dump(root).sql(sql, limits=QueryLimits(timeout_s, memory_bytes))
        rows = tuple(tuple(row.values()) for row in found.slice(0, MAX_ROWS).to_pylist())
        return QueryAnswer(tuple(found.column_names), rows, len(found))
    except (MemoryError, ExhaustedError):
        return ExhaustedError(_NO_MEMORY)
    except RankdumpError as error:
        return QueryError(str(error))
