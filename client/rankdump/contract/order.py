"""The global execution order as lines of a CSV file: names, columns, and both directions. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from rankdump.contract.errors import DamagedError
from rankdump.contract.events import EventKind
from rankdump.contract.key import sanitised
from rankdump.contract.status import OrderEntry

ORDER_FOLDER = "global_execution_order"
"""Folder under the root of a tree that holds the files below."""
ORDER_FILE = "execution_order.csv"
FINDINGS_FILE = "findings.txt"
"""What the merge found, one sentence a line; only there when it found something."""
JOB_FILE = "execution_order.job"
"""The id of the job that the two files above belong to."""

COLUMNS: tuple[str, ...] = (
    "position",
    "iteration",
    "graph",
    "kind",
    "name",
    "ranks",
    "group",
    "sequence",
    "start_us",
    "end_us",
    "missing",
)
"""The header line."""

_MAX_TAG = 40
_ONE_LINE = dict.fromkeys((*range(32), 127), " ")


def of_another_job(file_name: str, job_id: str) -> str:
    """Return the name that file has in a tree whose plain name belongs to another job."""
    tag = sanitised(job_id)[:_MAX_TAG]
    if tag != job_id:
        digest = hashlib.sha256(job_id.encode("utf-8", "surrogatepass")).hexdigest()
        tag = f"{tag}-{digest[:12]}"
    stem, _, suffix = file_name.rpartition(".")
    return f"{stem}.{tag}.{suffix}"


def to_row(entry: OrderEntry) -> list[str]:
    """Return the fields of one line, in the order of COLUMNS.

    A control character in a name becomes a blank, so that one entry is always one line.
    """
    return [
        str(entry.position),
        str(entry.iteration),
        str(entry.graph),
        entry.kind.name,
        entry.name.translate(_ONE_LINE),
        " ".join(map(str, entry.ranks)),
        entry.group.translate(_ONE_LINE),
        str(entry.sequence),
        str(entry.start_us),
        str(entry.end_us),
        " ".join(map(str, entry.missing)),
    ]


def from_row(row: Mapping[str, str]) -> OrderEntry:
    """Read a line back, given its fields by column; DamagedError names the line and the fault."""
    try:
        return OrderEntry(
            position=_count(row["position"]),
            iteration=_count(row["iteration"]),
            graph=_count(row["graph"]),
            kind=EventKind[row["kind"]],
            name=row["name"],
            ranks=_counts(row["ranks"]),
            group=row["group"],
            sequence=_count(row["sequence"]),
            start_us=int(row["start_us"]),
            end_us=int(row["end_us"]),
            missing=_counts(row["missing"]),
        )
    except KeyError as error:
        what = f"no column or kind {error.args[0]!r}"
    except (ValueError, TypeError, AttributeError) as error:
        what = str(error)
    raise DamagedError(f"execution order, line of position {row.get('position')!r}: {what}")


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError(f"{number} is below zero")
    return number


def _counts(text: str) -> tuple[int, ...]:
    return tuple(map(_count, text.split()))
