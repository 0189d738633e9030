"""Files that the coordinator has published in a tree: the merged execution order with its findings,
and the timeout hints. Reads only these files; the entries of an order are read while they are
iterated.

A long order has a Parquet table for each iteration, which tells the first and last position of the
iteration. Lines are sorted by position, so the place of an iteration in the order file follows. The
lines are read from the order file, which alone defines the order. pyarrow is imported on use.
"""

from __future__ import annotations

import heapq
import math
import os
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NamedTuple

from rankdump._analysis.reader.file_errors import named_errors
from rankdump._analysis.reader.foreign_dumps import read_foreign_order
from rankdump._core.events import Finding
from rankdump._core.execution_order import (
    FINDINGS_FILE,
    GLOBAL_ORDER_FOLDER,
    ORDER_HEADER,
    ORDER_JOB_FILE,
    OrderFileName,
    add_job_tag,
    make_job_tag,
    make_order_file_name,
    make_parquet_file_name,
    parse_finding_line,
    parse_order_file_name,
    parse_order_line,
)
from rankdump._core.plan import IterationSelection
from rankdump._core.status import OrderEntry
from rankdump._core.timeouts import HINTS_FILE, TimeoutHint, parse_hints
from rankdump._layout import tree_paths as layout
from rankdump._layout.dump_folders import RANK_FOLDER_PATTERN
from rankdump._layout.tree_paths import METADATA_FOLDER
from rankdump.errors import CorruptedError


@dataclass(frozen=True, slots=True)
class PublishedOrder:
    """Execution order of one job; its entries are read when they are iterated."""

    paths: tuple[Path, ...]
    """The order file of each graph and attempt, sorted by graph."""
    findings: tuple[Finding, ...]
    """Findings of the merge: mismatches, missing members, cycles."""
    others: tuple[str, ...] = ()
    """Names of the order files of other jobs in the same tree."""
    merged: tuple[OrderEntry, ...] = ()
    """Entries of a dump of another tool, which has no order files."""
    notes: tuple[str, ...] = ()
    """Sentences about what the order does not show."""

    @property
    def attempts(self) -> tuple[int, ...]:
        """Attempts that the order has entries of, ascending."""
        return tuple(sorted({_parse_name(path).attempt for path in self.paths})) or (0,)

    def entries(
        self,
        *,
        graph: int | None = None,
        iterations: IterationSelection | None = None,
        attempt: int | None = None,
    ) -> Iterator[OrderEntry]:
        """Yield the entries of all graphs by position; nothing is read before the caller needs it.

        Positions continue from one attempt of the job to the next.

        CorruptedError names the invalid file and line.
        """
        if self.merged:
            return (
                entry
                for entry in self.merged
                if graph in (None, entry.graph)
                and attempt in (None, entry.attempt)
                and (iterations is None or entry.iteration in iterations)
            )
        parts = [
            _read_entries(path, iterations)
            for path, name in list_order_files(self, attempt)
            if graph in (None, name.graph)
        ]
        return heapq.merge(*parts, key=lambda entry: entry.position)

    def list_damages(self, attempt: int | None = None) -> list[str]:
        """Return a sentence about each file that has lost its beginning or end. The last line of a
        running job may be incomplete for a moment.
        """
        files = [path for path, _ in list_order_files(self, attempt)]
        return [f"{path}: {why}" for path in files if (why := find_order_damage(path))]

    def read_last_entries(self, attempt: int | None = None) -> list[OrderEntry]:
        """Return the last entry of each graph and attempt; only the ends of the files are read."""
        found = (_read_last_entry(path) for path, _ in list_order_files(self, attempt))
        return [entry for entry in found if entry is not None]


def list_order_files(
    order: PublishedOrder, attempt: int | None = None
) -> list[tuple[Path, OrderFileName]]:
    """Return the files of an order, or of one attempt in it, with their parsed names."""
    named = ((path, _parse_name(path)) for path in order.paths)
    return [(path, name) for path, name in named if attempt in (None, name.attempt)]


def find_order_damage(path: Path) -> str:
    """Return what is wrong with the beginning or the end of an order file; empty if nothing is.

    CorruptedError if the file cannot be read.
    """
    with named_errors(path), path.open("rb") as file:
        header = file.readline(len(ORDER_HEADER))
        if not header:
            return "the file is empty: its order is lost"
        if header.decode("utf-8", "replace") != ORDER_HEADER:
            return "its first line is not the header of an order file"
        file.seek(-1, os.SEEK_END)
        return "" if file.read() == b"\n" else "its last line is incomplete: the rest is lost"


def read_order(root: Path, *, job_id: str = "") -> PublishedOrder:
    """Return the order of a job in a tree; without an id, that of the job that published last."""
    folder = root / GLOBAL_ORDER_FOLDER
    found = [
        path for path in folder.glob("*.csv") if parse_order_file_name(path.name) and path.is_file()
    ]
    if not found:
        foreign = read_foreign_order(root)
        if foreign is None or job_id:
            raise CorruptedError(_explain_missing_order(root))
        findings = tuple(foreign.findings)
        return PublishedOrder((), findings, merged=tuple(foreign.entries), notes=foreign.notes)
    latest = max(found, key=lambda path: path.stat().st_mtime_ns)
    tag = _job_tag(folder, job_id) if job_id else _parse_name(latest).tag
    own = [path for path in found if _parse_name(path).tag == tag]
    if not own:
        raise CorruptedError(f"{folder}: no order of job {job_id!r} has been published")
    return PublishedOrder(
        paths=tuple(sorted(own, key=_parse_name)),
        findings=_read_findings(folder / add_job_tag(FINDINGS_FILE, tag)),
        others=tuple(sorted(path.name for path in set(found) - set(own))),
    )


def _explain_missing_order(root: Path) -> str:
    """Return a sentence about a tree without a merged order, and about the orders that it has
    instead.
    """
    why = (
        f"{root / GLOBAL_ORDER_FOLDER / make_order_file_name(0)}: the file does not exist: "
        "no order has been published"
    )
    own = sorted(
        root.glob(f"rank_*/{layout.EXECUTION_ORDER_FOLDER}/ms_execution_order_graph_*.csv")
    )
    if own:
        first = own[0].relative_to(root)
        where = f"in {len(own)} files such as {first}" if len(own) > 1 else f"in {first}"
        return f"{why}; the execution order of each rank is {where}"
    if any(RANK_FOLDER_PATTERN.fullmatch(path.name) for path in root.glob("rank*")):
        return f"{why}; rankdump ls lists the tensors of each rank in the order it ran them"
    return why


def _job_tag(folder: Path, job_id: str) -> str:
    """Return the tag of a job in this tree; empty if the names of its files have no tag."""
    try:
        owner = (folder / ORDER_JOB_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        owner = ""
    return "" if owner == job_id else make_job_tag(job_id)


def _parse_name(path: Path) -> OrderFileName:
    return parse_order_file_name(path.name) or OrderFileName(-1, "")


def _read_entries(path: Path, iterations: IterationSelection | None) -> Iterator[OrderEntry]:
    attempt = _parse_name(path).attempt
    lines = _read_lines(path)
    _, header = next(lines, (1, ORDER_HEADER))
    if header != ORDER_HEADER:
        raise CorruptedError(f"{path}, line 1: {header[:80]!r} is not the header of an order file")
    spans = None if iterations is None else find_iteration_spans(path, iterations)
    if spans is not None:
        lines = chain.from_iterable(_read_lines(path, span) for span in spans)
    where = "line" if spans is None else "line of an iteration"
    for number, line in lines:
        try:
            # The second field is sufficient to skip most lines of a long file.
            if iterations is None or int(line.split(",", 2)[1]) in iterations:
                yield parse_order_line(line, attempt)
        except (CorruptedError, ValueError, IndexError) as error:
            raise CorruptedError(f"{path}, {where} {number}: {error}") from None


_TAIL_BYTES = 1 << 16
"""Bytes to read at the end of a file; an order line with some thousand ranks is shorter."""


def _read_last_entry(path: Path) -> OrderEntry | None:
    """Return the last complete entry of an order file; None if there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
        return parse_order_line(lines[-2].decode())
    except (OSError, CorruptedError, ValueError, IndexError):
        return None


def _read_findings(path: Path) -> tuple[Finding, ...]:
    findings: list[Finding] = []
    if not path.exists():
        return ()
    for number, line in _read_lines(path):
        try:
            findings.append(parse_finding_line(line))
        except CorruptedError as error:
            raise CorruptedError(f"{path}, line {number}: {error}") from None
    return tuple(findings)


def _read_lines(path: Path, span: LineSpan | None = None) -> Iterator[tuple[int, str]]:
    """Yield the complete lines with their numbers; a line without a line end is still being
    written.

    In a part of the file, numbers begin with 1.
    """
    try:
        with path.open("rb") as file:
            place = file.seek(0 if span is None else span.start)
            for number, line in enumerate(file, 1):
                place += len(line)
                if not line.endswith(b"\n") or (span is not None and place > span.end):
                    return
                yield number, line.decode()
    except OSError as error:
        raise CorruptedError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CorruptedError(f"{path}: {error}") from None


def read_hints(root: Path, job_id: str = "") -> tuple[TimeoutHint, ...]:
    """Return the hints of a job; without an id, those of the job whose hints were written last.

    CorruptedError when the file is missing or invalid, or has no hints of the job.
    """
    path = root / METADATA_FOLDER / HINTS_FILE
    with named_errors(path):
        try:
            hints = parse_hints(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CorruptedError("the file does not exist: no hints have been written") from None
        except UnicodeDecodeError as error:
            raise CorruptedError(str(error)) from None
    jobs = list(dict.fromkeys(hint.job_id for hint in hints))
    if job_id and job_id not in jobs:
        raise CorruptedError(
            f"{path}: no hints of job {job_id!r}; known: {', '.join(jobs) or 'none'}"
        )
    wanted = job_id or (jobs[-1] if jobs else "")
    return tuple(hint for hint in hints if hint.job_id == wanted)


_MIN_BYTES = 64 << 20
"""Size in bytes below which reading all of an order file takes no longer than loading pyarrow."""
_MAX_ITERATIONS = 256
"""Number of iterations above which most of the file has to be read anyway."""


class LineSpan(NamedTuple):
    """Consecutive lines of a file, as a range of bytes."""

    start: int
    end: int


def find_iteration_spans(path: Path, iterations: IterationSelection) -> list[LineSpan] | None:
    """Return the ranges of an order file that have the lines of iterations, in the order of the
    file.

    None if all lines have to be read: an iteration has no table, or the table of another order.
    """
    spans = iterations.spans
    if spans is None or sum(high - low + 1 for low, high in spans) > _MAX_ITERATIONS:
        return None
    found: list[LineSpan] = []
    try:
        if path.stat().st_size < _MIN_BYTES:
            return None
        with path.open("rb") as file:
            for iteration in {at for low, high in spans for at in range(low, high + 1)}:
                name = make_parquet_file_name(iteration)
                positions = _read_positions(path.with_suffix(".parquet") / name)
                span = _find_span(file, iteration, positions) if positions is not None else None
                if span is None:
                    return None
                found.append(span)
    except (OSError, ValueError):
        return None
    return sorted(found)


def _read_positions(path: Path) -> tuple[int, int] | None:
    """Return the first and the last position in the table of an iteration; None if it cannot be
    read.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:  # also of a pyarrow that does not fit NumPy
        return None
    try:
        with path.open("rb") as file:
            facts = pq.read_metadata(file)
    except (OSError, pa.ArrowException):
        return None
    at = facts.schema.names.index("position")
    groups = [facts.row_group(number).column(at) for number in range(facts.num_row_groups)]
    known = [each.statistics for each in groups if each.statistics is not None]
    if not known or len(known) < len(groups):
        return None
    return min(each.min for each in known), max(each.max for each in known)


def _find_span(file: BinaryIO, iteration: int, positions: tuple[int, int]) -> LineSpan | None:
    """Return the lines of an iteration; None if other lines have these positions."""
    start, last = (_find_line(file, position) for position in positions)
    found = [_read_numbers(file, place) for place in (start, last)]
    if found != [(position, iteration) for position in positions]:
        return None
    return LineSpan(start, last + len(_read_line(file, last)))


def _find_line(file: BinaryIO, position: int) -> int:
    """Return where the first line with at least this position begins; ValueError if the file is no
    order file.
    """
    file.seek(0)
    first, end = len(file.readline()), file.seek(0, os.SEEK_END)

    def read_position_behind(place: int) -> float:
        numbers = _read_numbers(file, place + len(_read_line(file, place)))
        return numbers[0] if numbers is not None else math.inf

    # Every line that begins after `low` has the position or a later one.
    low = first + bisect_left(range(first, end), position, key=read_position_behind)
    line = _read_numbers(file, low)
    return low if line is None or line[0] >= position else low + len(_read_line(file, low))


def _read_numbers(file: BinaryIO, place: int) -> tuple[int, int] | None:
    """Return the position and iteration of the line at a place; None if no whole line is there."""
    line = _read_line(file, place)
    if not line.endswith(b"\n"):
        return None
    position, iteration, _ = line.split(b",", 2)
    return int(position), int(iteration)


def _read_line(file: BinaryIO, place: int) -> bytes:
    file.seek(place)
    return file.readline()
