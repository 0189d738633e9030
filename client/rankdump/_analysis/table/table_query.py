"""SQL over the tensor table with DuckDB: `pip install 'rankdump[table]'`. Only SELECT statements
are run, and a statement can access only the views that it is given: no other file, no network, no
settings (DuckDB documentation, "Securing DuckDB").
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa

from rankdump._core.units import format_bytes
from rankdump.errors import ExhaustedError, QueryError

TENSORS, ITERATIONS = "tensors", "iterations"


@dataclass(frozen=True, slots=True)
class QueryLimits:
    """Resources that one query may take."""

    timeout_s: float = 60.0
    memory_bytes: int = 1 << 30
    threads: int = 0
    """Number of threads; 0 for one thread on each core."""


@dataclass(frozen=True, slots=True)
class TableViews:
    """Views that statements may name: Parquet files, and tables that are made when a statement
    names them.
    """

    files: Mapping[str, Sequence[Path]]
    made: Mapping[str, Callable[[], pa.Table]]

    @property
    def names(self) -> list[str]:
        """Names of all views, sorted."""
        return sorted({*self.files, *self.made})


def run_query(sql: str, views: TableViews, limits: QueryLimits | None = None) -> pa.Table:
    """Return the rows of a statement.

    QueryError for a statement that is not one SELECT, that DuckDB rejects, or that runs too long;
    ExhaustedError when it needs more memory.
    """
    limits = limits or QueryLimits()
    with duckdb.connect(":memory:") as connection:
        statement = _parse_select(connection, sql)
        _add_views(connection, sql, views)
        _restrict(connection, views, limits)
        return _run_statement(connection, statement, (), views, limits)


class OpenTable:
    """Connection that is kept for many statements with parameters over the same views, one at a
    time.

    A view that has to be made is made once. QueryError if a file of the views cannot be read.
    """

    def __init__(self, views: TableViews, limits: QueryLimits) -> None:
        self._views, self._limits = views, limits
        self._lock = threading.Lock()
        self._connection = duckdb.connect(":memory:")
        try:
            # Footers of files are read only once, because reading them takes longer than most
            # statements.
            self._connection.execute("SET parquet_metadata_cache = true")
            _add_views(self._connection, " ".join(views.made), views)
            _restrict(self._connection, views, limits)
        except BaseException:
            self._connection.close()
            raise

    def run(self, sql: str, values: Sequence[object] = ()) -> pa.Table:
        """Return the rows of a statement whose `?` are replaced by the values; raises as
        `run_query`.
        """
        with self._lock:
            statement = _parse_select(self._connection, sql)
            return _run_statement(self._connection, statement, values, self._views, self._limits)

    def close(self) -> None:
        """Close the connection, after the statement that is running."""
        with self._lock:
            self._connection.close()


def _run_statement(
    connection: duckdb.DuckDBPyConnection,
    statement: duckdb.Statement,
    values: Sequence[object],
    views: TableViews,
    limits: QueryLimits,
) -> pa.Table:
    timer = threading.Timer(limits.timeout_s, connection.interrupt)
    timer.start()
    try:
        return connection.sql(statement, params=list(values) or None).to_arrow_table()
    except duckdb.InterruptException:
        raise QueryError(f"the query took longer than {limits.timeout_s:g} s") from None
    except duckdb.OutOfMemoryException:
        raise ExhaustedError(
            f"the query needs more memory than {format_bytes(limits.memory_bytes)}"
        ) from None
    except duckdb.Error as error:
        raise QueryError(_explain(error, views)) from None
    finally:
        timer.cancel()


def _parse_select(connection: duckdb.DuckDBPyConnection, sql: str) -> duckdb.Statement:
    try:
        statements = connection.extract_statements(sql)
    except duckdb.Error as error:
        raise QueryError(f"not SQL: {_get_first_line(error)}") from None
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        kinds = ", ".join(each.type.name for each in statements) or "nothing"
        raise QueryError(f"one SELECT is allowed, and this is {kinds}")
    return statements[0]


def _add_views(connection: duckdb.DuckDBPyConnection, sql: str, views: TableViews) -> None:
    for name, paths in views.files.items():
        listed = ", ".join(_quote(str(path)) for path in paths)
        try:
            connection.execute(f"CREATE VIEW {name} AS SELECT * FROM read_parquet([{listed}])")
        except duckdb.Error as error:
            raise QueryError(f"view {name}: {_get_first_line(error)}") from None
    for name, make in views.made.items():
        # Made only if the statement names it, because some views need the whole tree to be read.
        if re.search(rf"\b{name}\b", sql, re.IGNORECASE):
            connection.register(name, make())


def _restrict(
    connection: duckdb.DuckDBPyConnection, views: TableViews, limits: QueryLimits
) -> None:
    files = [str(path) for paths in views.files.values() for path in paths]
    connection.execute("SET allowed_paths = ?", [files])
    connection.execute("SET memory_limit = ?", [f"{limits.memory_bytes >> 10}KiB"])
    connection.execute("SET temp_directory = ''")
    if limits.threads:
        connection.execute("SET threads = ?", [limits.threads])
    connection.execute("SET python_enable_replacements = false")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _get_first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _explain(error: duckdb.Error, views: TableViews) -> str:
    reason = _get_first_line(error)
    if isinstance(error, duckdb.CatalogException) and "Table with name" in reason:
        return f"{reason.partition(' Did you mean')[0]} There are {', '.join(views.names)}"
    if isinstance(error, duckdb.PermissionException):
        return f"a query reads only {', '.join(views.names)}: {reason}"
    return reason
