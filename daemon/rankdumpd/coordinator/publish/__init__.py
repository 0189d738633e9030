"""Writes the merged order into the tree of its job, iteration by iteration, and reads it back.

Every graph has a CSV file that grows, and for each iteration a Parquet table and a trace. The
book says how much of what grows is committed; its owner keeps it. Never edits a line once
committed, and an iteration is written as a whole or not at all.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from rankdump.contract.errors import DamagedError, ExhaustedError, RefusedError, UnavailableError
from rankdump.contract.findings import Finding
from rankdump.contract.order import (
    FINDINGS_FILE,
    HEADER,
    ORDER_FOLDER,
    finding_to_line,
    from_line,
    graph_and_tag,
    order_file,
    parquet_file,
    trace_file,
)
from rankdump.contract.status import OrderEntry
from rankdumpd import faults
from rankdumpd.coordinator.publish import files
from rankdumpd.coordinator.publish.blocks import graphs
from rankdumpd.coordinator.publish.lines import csv_lines
from rankdumpd.coordinator.publish.places import Place, opened
from rankdumpd.coordinator.publish.tables import parquet_there, write_table
from rankdumpd.coordinator.publish.trace import trace_lines
from rankdumpd.coordinator.values import Book, GlobalOrder

_LOG = logging.getLogger(__name__)
_REFUSALS = (OSError, DamagedError, RefusedError, UnavailableError)


class Publisher:
    """Appends to the files of every job; its owner calls from one thread at a time."""

    def __init__(
        self,
        *,
        table_events: int = 1_000_000_000,
        trace_events: int = 1_000_000,
        roots: Sequence[str] = (),
    ) -> None:
        """Take the largest number of events that an iteration with a table, with a trace has.

        `roots` are the folders that trees may be in, any when there are none.
        """
        self._roots = roots
        self._table_events = table_events
        self._trace_events = trace_events
        self._told: set[str] = set()

    def append(
        self, order: GlobalOrder, *, job_id: str, root: str, book: Book | None
    ) -> tuple[Book | None, str]:
        """Write an iteration, all of it or nothing.

        Return the new book and no problem, or no book and why nothing was written; ExhaustedError
        when the disk has no room or ails, and the same may succeed later.
        """
        try:
            place = opened(job_id, root, book, roots=self._roots, iteration=order.iteration)
            return self._written(place, order, job_id, root), ""
        except _REFUSALS as error:
            if faults.passes(error):
                raise ExhaustedError(f"{root}: {faults.said(error)}") from None
            problem = f"{len(order)} entries could not be published: {error}"
            _LOG.error("job %s, iteration %d: %s", job_id, order.iteration, problem)
            return None, f"iteration {order.iteration}: {problem}"

    def _written(self, place: Place, order: GlobalOrder, job_id: str, root: str) -> Book:
        sizes = dict(place.sizes)
        traced = self._is_traced(order, job_id)
        tabled = _events(order) <= self._table_events and parquet_there()
        with ExitStack() as undo:
            for graph in graphs(order):
                name = place.named(order_file(graph))
                size = sizes.get(name, 0)
                undo.callback(
                    _undone, lambda at=place.folder / name, size=size: files.cut(at, size)
                )
                chunks = csv_lines(order, graph, place.position)
                sizes[name] = _append(place.folder / name, chunks, size)
                _write_wholes(place, order, graph, undo, tabled=tabled, traced=traced)
            undo.pop_all()
        return Book(root, sizes, place.position + len(order))

    def _is_traced(self, order: GlobalOrder, job_id: str) -> bool:
        events = _events(order)
        if events > self._trace_events and job_id not in self._told:
            self._told.add(job_id)
            text = "job %s: no trace of iterations with more than %d events, as %d has"
            _LOG.warning(text, job_id, self._trace_events, order.iteration)
        return events <= self._trace_events


def note(
    findings: Sequence[Finding],
    *,
    job_id: str,
    root: str,
    book: Book | None,
    roots: Sequence[str] = (),
) -> tuple[Book | None, str]:
    """Write findings beside the order, all or none.

    Return the new book and no problem, or the old book and why they could not be written;
    ExhaustedError as `Publisher.append` raises it.
    """
    if not findings:
        return book, ""
    try:
        place = opened(job_id, root, book, roots=roots)
        name = place.named(FINDINGS_FILE)
        lines = (finding_to_line(finding).encode() for finding in findings)
        size = files.append(place.folder / name, lines, size_bytes=place.sizes.get(name, 0))
        return Book(root, place.sizes | {name: size}, place.position), ""
    except _REFUSALS as error:
        if faults.passes(error):
            raise ExhaustedError(f"{root}: {faults.said(error)}") from None
        _LOG.error("job %s: findings could not be published: %s", job_id, error)
        return book, f"{len(findings)} findings could not be published: {error}"


def published(book: Book, graph: int | None = None) -> Iterator[OrderEntry]:
    """Yield the committed entries in order, of one graph or of all."""
    parts = [
        _entries(Path(book.root) / ORDER_FOLDER / name, size)
        for name, size in book.sizes.items()
        if (named := graph_and_tag(name)) and graph in (None, named[0])
    ]
    return heapq.merge(*parts, key=lambda entry: entry.position)


def _events(order: GlobalOrder) -> int:
    return len(order) - len(order.calls) + len(order.calls.members["rank"])


def _append(path: Path, lines: Iterator[bytes], size_bytes: int) -> int:
    def chunks() -> Iterator[bytes]:
        if not size_bytes:
            yield HEADER.encode()
        yield from lines

    return files.append(path, chunks(), size_bytes=size_bytes)


def _write_wholes(
    place: Place, order: GlobalOrder, graph: int, undo: ExitStack, *, tabled: bool, traced: bool
) -> None:
    """Write what an iteration has to itself."""
    if tabled:
        folder = place.folder / place.named(order_file(graph, "parquet"))
        path = folder / parquet_file(order.iteration)
        files.make_folder(folder)
        undo.callback(_undone, path.unlink)
        write_table(path, order, graph, place.position)
    if traced:
        folder = place.folder / place.named(order_file(graph, "trace"))
        path = folder / trace_file(order.iteration)
        files.make_folder(folder)
        undo.callback(_undone, path.unlink)
        files.write_whole(path, trace_lines(order, graph, place.position))


def _undone(step: Callable[[], None]) -> None:
    # What cannot be undone now is undone before the next iteration: the book does not have it.
    with suppress(OSError):
        step()


def _entries(path: Path, size_bytes: int) -> Iterator[OrderEntry]:
    try:
        with open(path, "rb", opener=files.not_through_links) as file:
            at = len(file.readline())
            while at < size_bytes and (line := file.readline()):
                at += len(line)
                yield from_line(line.decode(errors="replace"))
    except OSError as error:
        raise UnavailableError(f"execution order cannot be read: {error}") from None
    except DamagedError as error:
        raise DamagedError(f"{path}: {error}") from None
