"""Publisher and reader of the merged order, and the order folder of a job with its committed sizes.

Every graph has a CSV file that grows, and for each iteration a Parquet table and a trace. The
published offsets, which the caller stores, contain the committed size of each growing file. A
committed line is never changed, and an iteration is written as a whole or not at all.

Attempts of a job after the first one have files of their own, and positions continue from one
attempt to the next. File names without a tag belong to the first job that publishes into a tree,
which `execution_order.job` names; the file names of other jobs contain a tag. Bytes after the
committed ones were left by a crash. Without offsets, because the state was lost, existing lines are
kept except for those of the iteration that is about to be written, because it was not committed.
"""

from __future__ import annotations

import heapq
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from rankdump._core import tree_root as trees
from rankdump._core.events import Finding
from rankdump._core.execution_order import (
    FINDINGS_FILE,
    GLOBAL_ORDER_FOLDER,
    ORDER_HEADER,
    ORDER_JOB_FILE,
    add_job_tag,
    format_finding_line,
    make_job_tag,
    make_order_file_name,
    make_parquet_file_name,
    make_trace_file_name,
    parse_finding_line,
    parse_order_file_name,
    parse_order_line,
)
from rankdump._core.log_once import LogOnce
from rankdump._core.status import OrderEntry
from rankdump.errors import CorruptedError, ExhaustedError, RejectedError, UnavailableError
from rankdumpd.coordinator.fleet_views import GlobalOrder, PublishedOffsets
from rankdumpd.coordinator.publish.order_lines import format_csv_lines, list_graphs
from rankdumpd.coordinator.publish.order_trace import format_trace
from rankdumpd.coordinator.publish.parquet_table import has_parquet, write_parquet_table
from rankdumpd.coordinator.publish.tree_files import (
    append_chunks,
    make_tree_folder,
    open_without_links,
    truncate_file,
    write_whole_file,
)
from rankdumpd.server import state_files

_logger = logging.getLogger(__name__)
_HEADER = ORDER_HEADER.encode()


@dataclass(frozen=True, slots=True)
class OrderFolder:
    """Folder of a job's order, whose files are truncated to their committed sizes."""

    folder: Path
    tag: str
    sizes: dict[str, int]
    position: int

    def name_file(self, file_name: str) -> str:
        """Return a file name of this job, which contains the job's tag if it has one."""
        return add_job_tag(file_name, self.tag)


def open_order_folder(
    job_id: str,
    root: str,
    offsets: PublishedOffsets | None,
    *,
    roots: Sequence[str] = (),
    iteration: int = -1,
    attempt: int = 0,
) -> OrderFolder:
    """Open the folder of a job; CorruptedError, RejectedError, UnavailableError or OSError on
    failure.

    `roots` are the folders that trees may be in; if empty, trees may be anywhere. `iteration` of
    `attempt` is the iteration that is about to be written, if any.
    """
    if not root:
        raise UnavailableError(f"no agent has reported the tree of job {job_id!r}")
    trees.check_root(root, roots, resolve=os.path.realpath)
    folder = Path(root) / GLOBAL_ORDER_FOLDER
    Path(root).mkdir(parents=True, exist_ok=True)
    make_tree_folder(folder)
    tag = "" if _claim_folder(folder / ORDER_JOB_FILE, job_id) == job_id else make_job_tag(job_id)
    if offsets is None or offsets.root != root:
        position = 0 if offsets is None else offsets.position
        return _recover_folder(folder, tag, (iteration, attempt), position)
    sizes = {
        name: size
        for name, size in offsets.sizes.items()
        if _has_committed_bytes(folder / name, size)
    }
    for name in _list_order_files(folder, tag):
        size = sizes.get(name, 0)
        if (folder / name).stat().st_size > size:
            _logger.warning(
                "%s: cut to its %d committed bytes; the rest was not committed", folder / name, size
            )
            _check_order_file(folder / name)
            truncate_file(folder / name, size)
    return OrderFolder(folder, tag, sizes, offsets.position)


def _claim_folder(path: Path, job_id: str) -> str:
    """Return the job that owns the file names without a tag: this job if it is the first one."""
    try:
        with open(path, "x", encoding="utf-8", newline="", opener=open_without_links) as file:
            file.write(job_id)
        return job_id
    except FileExistsError:
        return path.read_text(encoding="utf-8", errors="replace")


def _list_order_files(folder: Path, tag: str) -> list[str]:
    """Return the growing files of a job that exist, sorted by name."""
    findings = add_job_tag(FINDINGS_FILE, tag)
    names = sorted(path.name for path in folder.iterdir())
    parsed = {name: parse_order_file_name(name) for name in names}
    return [n for n, parts in parsed.items() if n == findings or (parts and parts.tag == tag)]


def _has_committed_bytes(path: Path, size_bytes: int) -> bool:
    real = path.lstat().st_size if path.exists() else -1
    if real < size_bytes:
        _logger.warning("%s is missing or shorter than committed; a new file is begun", path)
    return real >= size_bytes


def _check_order_file(path: Path) -> None:
    """Raise a CorruptedError when the first line is not the header of an execution order."""
    with open(path, "rb", opener=open_without_links) as file:
        head = file.readline()
    if parse_order_file_name(path.name):
        is_order_file = _HEADER.startswith(head)
    else:
        is_order_file = not head.endswith(b"\n") or head.startswith(b'{"kind"')
    if not is_order_file:
        raise CorruptedError(
            f"{path} is not a file of an execution order: it begins with {head[:80]!r}"
        )


def _recover_folder(folder: Path, tag: str, written: tuple[int, int], position: int) -> OrderFolder:
    """Truncate the files before incomplete lines and before lines of an iteration; return the
    folder.

    `written` is the iteration with its attempt.
    """
    sizes: dict[str, int] = {}
    for name in _list_order_files(folder, tag):
        _check_order_file(folder / name)
        parts = parse_order_file_name(name)
        is_order = parts is not None
        numbers = partial(_parse_order_numbers, parts.attempt) if parts else _parse_finding_numbers
        size, next_position = _measure_whole_lines(folder / name, numbers, written)
        position = max(position, next_position)
        if size > is_order * len(_HEADER):
            sizes[name] = size
        truncate_file(folder / name, sizes.get(name, 0))
    if sizes:
        _logger.warning("%s: the existing order is continued at position %d", folder, position)
    return OrderFolder(folder, tag, sizes, position)


_LineNumbers = Callable[[bytes], tuple[tuple[int, int], int]]
"""Function that returns the iteration and attempt of a line, and the position of the next line."""


def _parse_order_numbers(attempt: int, line: bytes) -> tuple[tuple[int, int], int]:
    if line == _HEADER:
        return (-1, attempt), 0
    position, iteration, _ = line.split(b",", 2)
    return (int(iteration), attempt), int(position) + 1


def _parse_finding_numbers(line: bytes) -> tuple[tuple[int, int], int]:
    finding = parse_finding_line(line.decode(errors="replace"))
    return (finding.iteration, finding.attempt), 0


def _measure_whole_lines(
    path: Path, numbers: _LineNumbers, written: tuple[int, int]
) -> tuple[int, int]:
    """Return the number of bytes before an incomplete last line and before the iteration `written`,
    and the next position.
    """
    size_bytes = at = next_position = 0
    for line in _iter_whole_lines(path):
        try:
            of, following = numbers(line)
        except (ValueError, CorruptedError):
            raise CorruptedError(
                f"{path}: {line[:80]!r} is not a line of an execution order"
            ) from None
        at += len(line)
        if of != written:
            size_bytes, next_position = at, following
    return size_bytes, next_position


def _iter_whole_lines(path: Path) -> Iterator[bytes]:
    with open(path, "rb", opener=open_without_links) as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line
            else:
                _logger.warning(
                    "%s: %d bytes of an incomplete last line are cut off", path, len(line)
                )


_WRITE_ERRORS = (OSError, CorruptedError, RejectedError, UnavailableError)


class OrderPublisher:
    """Appends iterations and findings to the files of every job; for one thread at a time."""

    def __init__(
        self,
        *,
        table_events: int = 1_000_000_000,
        trace_events: int = 1_000_000,
        roots: Sequence[str] = (),
    ) -> None:
        """Tables and traces are written for iterations with at most this number of events.

        `roots` are the folders that trees may be in; if empty, trees may be anywhere.
        """
        self.roots = roots
        self._table_events = table_events
        self._trace_events = trace_events
        self._logged = LogOnce(_logger)

    def append(
        self, order: GlobalOrder, *, job_id: str, root: str, offsets: PublishedOffsets | None
    ) -> tuple[PublishedOffsets | None, str]:
        """Write an iteration as a whole or not at all.

        Return the new offsets and an empty text, or no offsets and why nothing was written.
        ExhaustedError when the disk is full or fails and another attempt may succeed.
        """
        try:
            target = open_order_folder(
                job_id,
                root,
                offsets,
                roots=self.roots,
                iteration=order.iteration,
                attempt=order.attempt,
            )
            return self._write(target, order, job_id, root), ""
        except _WRITE_ERRORS as error:
            _raise_if_transient(root, error)
            problem = f"{len(order)} entries of the order could not be published: {error}"
            about = {"job": job_id, "iteration": order.iteration, "root": root}
            _logger.error("job %s, iteration %d: %s", job_id, order.iteration, problem, extra=about)
            return None, f"iteration {order.iteration}: {problem}"

    def append_findings(
        self,
        findings: Sequence[Finding],
        *,
        job_id: str,
        root: str,
        offsets: PublishedOffsets | None,
    ) -> tuple[PublishedOffsets | None, str]:
        """Write findings beside the order, all or none.

        Return the new offsets and an empty text, or the old offsets and why nothing was written;
        ExhaustedError as in `append`.
        """
        if not findings:
            return offsets, ""
        try:
            target = open_order_folder(job_id, root, offsets, roots=self.roots)
            name = target.name_file(FINDINGS_FILE)
            lines = (format_finding_line(finding).encode() for finding in findings)
            size = append_chunks(target.folder / name, lines, size_bytes=target.sizes.get(name, 0))
            return PublishedOffsets(root, target.sizes | {name: size}, target.position), ""
        except _WRITE_ERRORS as error:
            _raise_if_transient(root, error)
            about = {"job": job_id, "root": root}
            _logger.error("job %s: findings could not be published: %s", job_id, error, extra=about)
            return offsets, f"{len(findings)} findings could not be published: {error}"

    def _write(
        self, target: OrderFolder, order: GlobalOrder, job_id: str, root: str
    ) -> PublishedOffsets:
        sizes = dict(target.sizes)
        traced = self._is_traced(order, job_id)
        tabled = _count_events(order) <= self._table_events and has_parquet()
        with ExitStack() as undo:
            for graph in list_graphs(order):
                name = target.name_file(make_order_file_name(graph, attempt=order.attempt))
                size = sizes.get(name, 0)
                undo.callback(_undo_step, partial(truncate_file, target.folder / name, size))
                chunks = format_csv_lines(order, graph, target.position)
                sizes[name] = _append_lines(target.folder / name, chunks, size)
                _write_iteration_files(target, order, graph, undo, tabled=tabled, traced=traced)
            undo.pop_all()
        return PublishedOffsets(root, sizes, target.position + len(order))

    def _is_traced(self, order: GlobalOrder, job_id: str) -> bool:
        events = _count_events(order)
        if events <= self._trace_events:
            return True
        text = (
            f"job {job_id}: iteration {order.iteration} has more than {self._trace_events} events; "
            "no trace is written of such iterations"
        )
        self._logged.log(logging.WARNING, text, about=job_id)
        return False


def _raise_if_transient(root: str, error: Exception) -> None:
    """Raise an ExhaustedError if another attempt may succeed."""
    if state_files.is_transient(error):
        raise ExhaustedError(f"{root}: {state_files.describe_error(error)}") from None


def read_published_entries(
    offsets: PublishedOffsets, graph: int | None = None
) -> Iterator[OrderEntry]:
    """Yield the committed entries in order, for one graph or for all."""
    parts = [
        _read_entries(Path(offsets.root) / GLOBAL_ORDER_FOLDER / name, size, named.attempt)
        for name, size in offsets.sizes.items()
        if (named := parse_order_file_name(name)) and graph in (None, named.graph)
    ]
    return heapq.merge(*parts, key=lambda entry: entry.position)


def _count_events(order: GlobalOrder) -> int:
    return len(order) - len(order.calls) + len(order.calls.members["rank"])


def _append_lines(path: Path, lines: Iterator[bytes], size_bytes: int) -> int:
    header = () if size_bytes else (_HEADER,)
    return append_chunks(path, chain(header, lines), size_bytes=size_bytes)


def _write_iteration_files(
    target: OrderFolder,
    order: GlobalOrder,
    graph: int,
    undo: ExitStack,
    *,
    tabled: bool,
    traced: bool,
) -> None:
    """Write the table and the trace of an iteration."""
    for form, is_wanted, name_file, write in (
        ("parquet", tabled, make_parquet_file_name, write_parquet_table),
        ("trace", traced, make_trace_file_name, _write_trace),
    ):
        if is_wanted:
            name = target.name_file(make_order_file_name(graph, form, order.attempt))
            path = target.folder / name / name_file(order.iteration)
            make_tree_folder(path.parent)
            undo.callback(_undo_step, path.unlink)
            write(path, order, graph, target.position)


def _write_trace(path: Path, order: GlobalOrder, graph: int, first_position: int) -> None:
    write_whole_file(path, format_trace(order, graph, first_position))


def _undo_step(step: Callable[[], None]) -> None:
    # A failed step is repeated before the next iteration, because the offsets do not include its
    # bytes.
    with suppress(OSError):
        step()


def _read_entries(path: Path, size_bytes: int, attempt: int) -> Iterator[OrderEntry]:
    try:
        with open(path, "rb", opener=open_without_links) as file:
            at = len(file.readline())
            while at < size_bytes and (line := file.readline()):
                at += len(line)
                yield parse_order_line(line.decode(errors="replace"), attempt)
    except OSError as error:
        raise UnavailableError(f"execution order cannot be read: {error}") from None
    except CorruptedError as error:
        raise CorruptedError(f"{path}: {error}") from None
