"""Files of the global execution order in a tree: names, columns, and formatting and parsing of
lines. Pure: no clock, no disk, no network.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from rankdump._core.events import EventKind, Finding
from rankdump._core.json_values import make_plain, read_json
from rankdump._core.record import sanitize_name
from rankdump._core.status import OrderEntry
from rankdump.errors import CorruptedError

GLOBAL_ORDER_FOLDER = "global_execution_order"
"""Folder in the root of a tree with the files of the execution order."""
FINDINGS_FILE = "findings.jsonl"
"""File of the findings of the merge, one JSON object per line; absent if there are none."""
ORDER_JOB_FILE = "execution_order.job"
"""File with the id of the job whose order files have plain names."""


def _parse_count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError(f"{number} is negative")
    return number


def _parse_counts(text: str) -> tuple[int, ...]:
    return tuple(map(_parse_count, text.split()))


_CELL_READERS: Mapping[str, Callable[[str], Any]] = {
    "position": _parse_count,
    "iteration": _parse_count,
    "graph": _parse_count,
    "kind": EventKind.__getitem__,
    "name": str,
    "ranks": _parse_counts,
    "group": str,
    "sequence": _parse_count,
    "start_us": int,
    "end_us": int,
    "missing": _parse_counts,
    "rank_positions": _parse_counts,
    "streams": _parse_counts,
    "element_count": _parse_count,
    "dtype": str,
    "peer": int,
}
ORDER_COLUMNS: tuple[str, ...] = tuple(_CELL_READERS)
"""Names of the fields of an entry, in the order in which a line has them."""
ORDER_HEADER = ",".join(ORDER_COLUMNS) + "\n"
"""The first line of an order file."""

_MAX_TAG_CHARACTERS = 40
_CONTROL_CHARACTERS = dict.fromkeys((*range(32), 127), " ")
_ORDER_NAME = re.compile(
    r"execution_order_graph_(0|[1-9][0-9]{0,9})(?:_attempt_([1-9][0-9]{0,9}))?(?:\.([^.]+))?\.csv"
)


class OrderFileName(NamedTuple):
    """Parts of the name of an order file."""

    graph: int
    tag: str
    """Tag of the job; empty for the job whose files have plain names."""
    attempt: int = 0


def make_order_file_name(graph: int, suffix: str = "csv", attempt: int = 0) -> str:
    """Return the name of a graph's execution order: a `csv` file, or a folder for `parquet` or
    `trace`.

    Attempts after the first have files of their own, because they repeat iterations.
    """
    number = f"_attempt_{attempt}" if attempt else ""
    return f"execution_order_graph_{graph}{number}.{suffix}"


def make_trace_file_name(iteration: int) -> str:
    """Return the name of an iteration's trace in the trace folder of its graph."""
    return f"iteration_{iteration}.json"


def make_parquet_file_name(iteration: int) -> str:
    """Return the name of an iteration's Parquet file in the folder of its graph."""
    return f"iteration_{iteration}.parquet"


def parse_order_file_name(file_name: str) -> OrderFileName | None:
    """Return the parts of the name of an order file; None for any other file."""
    found = _ORDER_NAME.fullmatch(file_name)
    return OrderFileName(int(found[1]), found[3] or "", int(found[2] or 0)) if found else None


def make_job_tag(job_id: str) -> str:
    """Return the tag that a job has in its file names if another job has the plain names."""
    tag = sanitize_name(job_id)[:_MAX_TAG_CHARACTERS]
    if tag != job_id:
        digest = hashlib.sha256(job_id.encode("utf-8", "surrogatepass")).hexdigest()
        tag = f"{tag}-{digest[:12]}"
    return tag


def add_job_tag(file_name: str, tag: str) -> str:
    """Return a file name with the tag of a job; an empty tag changes nothing."""
    stem, _, suffix = file_name.rpartition(".")
    return f"{stem}.{tag}.{suffix}" if tag else file_name


def format_order_field(text: str) -> str:
    """Return a name as a field of a line, quoted if CSV requires it.

    A control character in the name becomes a blank, so that one entry is always one line.
    """
    text = text.translate(_CONTROL_CHARACTERS)
    return '"' + text.replace('"', '""') + '"' if '"' in text or "," in text else text


def format_order_line(entry: OrderEntry) -> str:
    """Return an entry of the execution order as a line."""
    cells = (
        entry.position,
        entry.iteration,
        entry.graph,
        entry.kind.name,
        format_order_field(entry.name),
        _join_numbers(entry.ranks),
        format_order_field(entry.group),
        entry.sequence,
        entry.start_us,
        entry.end_us,
        _join_numbers(entry.missing),
        _join_numbers(entry.rank_positions),
        _join_numbers(entry.streams),
        entry.element_count,
        format_order_field(entry.dtype),
        entry.peer,
    )
    return ",".join(map(str, cells)) + "\n"


def parse_order_line(line: str, attempt: int = 0) -> OrderEntry:
    """Parse a line of an order file of an attempt; CorruptedError names the line and the fault."""
    try:
        (cells,) = csv.reader(io.StringIO(line, newline=""), strict=True)
        row = zip(_CELL_READERS.items(), cells, strict=True)
        return OrderEntry(**{name: read(cell) for (name, read), cell in row}, attempt=attempt)
    except KeyError as error:
        what = f"no kind {error.args[0]!r}"
    except (ValueError, csv.Error) as error:
        what = str(error)
    raise CorruptedError(f"{line[:80]!r} is not a line of an execution order: {what}")


def format_finding_line(finding: Finding) -> str:
    """Return a finding as a line: a JSON object with the finding's fields."""
    return json.dumps(make_plain(finding)) + "\n"


def parse_finding_line(line: str) -> Finding:
    """Parse the line of a finding; CorruptedError names the line and the fault."""
    try:
        return read_json(Finding, json.loads(line), defaults=True)
    except (ValueError, RecursionError) as error:
        raise CorruptedError(f"{line[:80]!r} is not a line of a findings file: {error}") from None


def _join_numbers(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))
