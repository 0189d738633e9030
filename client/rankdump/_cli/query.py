"""Command `rankdump query`: runs SQL over the tensors, iterations, events and findings
of a tree.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from rankdump._cli.command_group import explain_missing_modules
from rankdump._cli.options import DUMP_PATH
from rankdump._cli.output import TableColumn, print_json, print_lines, print_rows
from rankdump._core.units import format_count
from rankdump._web.limited_process import limit_address_space
from rankdump.errors import ConfigError, ExhaustedError

if TYPE_CHECKING:
    import pyarrow as pa

_MAX_ROWS_SHOWN = 1000
_SIGNIFICANT_DIGITS = 6
_GRACE_S = 5.0


@click.command()
@click.argument("tree", type=DUMP_PATH)
@click.argument("sql")
@click.option("--csv", "form", flag_value="csv", help="Print CSV, all rows.")
@click.option("--json", "form", flag_value="json", help="Print one JSON object to stdout.")
@click.option(
    "--parquet",
    "target",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the rows to this file.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0.001),
    default=60.0,
    show_default=True,
    help="Longest time in seconds.",
)
@click.option(
    "--memory",
    "memory_mib",
    type=click.IntRange(min=16),
    default=1024,
    show_default=True,
    help="Memory in MiB.",
)
def query(
    *,
    tree: Path,
    sql: str,
    form: str | None,
    target: Path | None,
    timeout_s: float,
    memory_mib: int,
) -> int:
    """Run one SELECT over a tree.

    The views are `tensors`, `iterations`, `events` and `findings`; docs/querying.md has their
    columns and examples. Without a table (`rankdump index`), every manifest is read. Only the
    tree is read, and nothing is written but the file of --parquet.
    """
    with explain_missing_modules("table"):
        from rankdump._analysis.table.table_query import QueryLimits
    import rankdump

    dump = rankdump.open(tree)
    limits = QueryLimits(timeout_s, memory_mib << 20)
    # DuckDB does not count the memory of a single huge value.
    limit_address_space(limits.memory_bytes)
    try:
        with _deadline(timeout_s):
            found = dump.sql(sql, limits=limits)
    except MemoryError:
        raise ExhaustedError(
            f"the query needs more memory than --memory {memory_mib} allows; a tree without a "
            f"table (rankdump index {tree}) needs most"
        ) from None
    damages = dict.fromkeys((*dump.walked_problems, *note_table_lag(tree)))
    if target is not None:
        _write_parquet(found, target)
    elif form == "json":
        print_json({"rows": [_make_plain(row) for row in found.to_pylist()]})
    elif form == "csv":
        click.echo(_format_csv(found), nl=False)
    else:
        _print_rows(found)
    print_lines(damages, err=True)
    return 1 if damages else 0


@contextmanager
def _deadline(timeout_s: float) -> Generator[None, None, None]:
    """End the process if DuckDB does not stop by itself, because within an operator it does not
    notice a timeout.
    """

    def end_process() -> None:
        click.echo(f"rankdump: the query took longer than {timeout_s:g} s", err=True)
        os._exit(2)

    timer = threading.Timer(timeout_s + _GRACE_S, end_process)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def note_table_lag(tree: Path) -> tuple[str, ...]:
    """Print on stderr how far the table of a tree is behind the tree, and return sentences about
    damaged manifests, which cannot be in the table; do nothing for a tree without a table.
    """
    from rankdump._analysis.table.table_files import list_tensor_files
    from rankdump._analysis.table_index import compare_with_tree

    if not list_tensor_files(tree):
        return ()
    lag = compare_with_tree(tree)
    print_lines([f"the table {lag}: run rankdump index {tree}"] if str(lag) else [], err=True)
    return lag.damages


def _write_parquet(found: pa.Table, target: Path) -> None:
    import pyarrow.parquet as pq

    try:
        pq.write_table(found, target)
    except OSError as error:
        raise ConfigError("command line", "--parquet", str(target), f"a file ({error})") from None
    print_lines([f"{format_count(len(found), 'row')} in {target}"])


def _make_plain(value: Any) -> Any:
    """Return a value that JSON can represent, without NaN and infinities."""
    if isinstance(value, dict):
        named = cast("dict[object, Any]", value)
        return {str(name): _make_plain(each) for name, each in named.items()}
    if isinstance(value, list | tuple):
        return [_make_plain(each) for each in cast("Sequence[Any]", value)]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _format_csv(found: pa.Table) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(found.column_names)
    for row in found.to_pylist():
        writer.writerow(
            json.dumps(_make_plain(value)) if isinstance(value, list | dict) else value
            for value in row.values()
        )
    return text.getvalue()


def _print_rows(found: pa.Table) -> None:
    import pyarrow as pa

    kinds = pa.types
    columns = [
        TableColumn(field.name, kinds.is_integer(field.type) or kinds.is_floating(field.type))
        for field in found.schema
    ]
    shown = found.slice(0, _MAX_ROWS_SHOWN).to_pylist()
    print_rows(columns, [list(map(_format_value, row.values())) for row in shown])
    if len(found) > _MAX_ROWS_SHOWN:
        print_lines([f"{format_count(len(found) - _MAX_ROWS_SHOWN, 'more row')}; --csv prints all"])


def _format_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.{_SIGNIFICANT_DIGITS}g}"
    return "" if value is None else str(_make_plain(value))
