"""The merged order of a tree, from the files the coordinator published. Reads only those."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rankdump.contract.errors import DamagedError
from rankdump.contract.findings import Finding
from rankdump.contract.layout import mindspore_sync as layout
from rankdump.contract.layout.folders import RANK_FOLDER
from rankdump.contract.order import (
    FINDINGS_FILE,
    HEADER,
    JOB_FILE,
    ORDER_FOLDER,
    finding_from_line,
    from_line,
    graph_and_tag,
    order_file,
    tag_of,
    tagged,
)
from rankdump.contract.plan import Iterations
from rankdump.contract.status import OrderEntry


@dataclass(frozen=True, slots=True)
class PublishedOrder:
    """What one job's files say; the entries stay in the files until they are asked for."""

    paths: tuple[Path, ...]
    """The order of each graph, lowest graph first."""
    findings: tuple[Finding, ...]
    """What the merge found: mismatches, missing members, cycles."""
    others: tuple[str, ...] = ()
    """Names of the order files that other jobs left in the same tree."""

    def entries(
        self, *, graph: int | None = None, iterations: Iterations | None = None
    ) -> Iterator[OrderEntry]:
        """Yield the entries of all graphs by position, reading no further than is asked for.

        DamagedError names the file and line at fault.
        """
        paths = (path for path in self.paths if graph in (None, _graph_and_tag(path)[0]))
        parts = [_entries(path, iterations) for path in paths]
        return heapq.merge(*parts, key=lambda entry: entry.position)


def read_order(root: Path, *, job_id: str = "") -> PublishedOrder:
    """Return the order of a job in a tree; without a job, of the one that published last."""
    folder = root / ORDER_FOLDER
    found = [path for path in folder.glob("*.csv") if graph_and_tag(path.name) and path.is_file()]
    if not found:
        raise DamagedError(_unpublished(root))
    latest = max(found, key=lambda path: path.stat().st_mtime_ns)
    tag = _tag(folder, job_id) if job_id else _graph_and_tag(latest)[1]
    own = [path for path in found if _graph_and_tag(path)[1] == tag]
    if not own:
        raise DamagedError(f"{folder}: nothing of job {job_id!r} has been published here")
    return PublishedOrder(
        paths=tuple(sorted(own, key=_graph_and_tag)),
        findings=_findings(folder / tagged(FINDINGS_FILE, tag)),
        others=tuple(sorted(path.name for path in set(found) - set(own))),
    )


def _unpublished(root: Path) -> str:
    """Return what to say of a tree without an order of all ranks: what it has instead."""
    why = f"{root / ORDER_FOLDER / order_file(0)}: not there: no order has been published"
    own = sorted(root.glob(f"rank_*/{layout.ORDER_FOLDER}/ms_execution_order_graph_*.csv"))
    if own:
        first = own[0].relative_to(root)
        return f"{why}; what each rank ran in a graph stands in {len(own)} files such as {first}"
    if any(RANK_FOLDER.fullmatch(path.name) for path in root.glob("rank*")):
        return f"{why}; rankdump ls lists the tensors of each rank in the order it ran them"
    return why


def _tag(folder: Path, job_id: str) -> str:
    """Return the tag that a job has in this tree: none when the plain names are its own."""
    try:
        owner = (folder / JOB_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        owner = ""
    return "" if owner == job_id else tag_of(job_id)


def _graph_and_tag(path: Path) -> tuple[int, str]:
    return graph_and_tag(path.name) or (-1, "")


def _entries(path: Path, iterations: Iterations | None) -> Iterator[OrderEntry]:
    for number, line in _lines(path):
        if number == 1:
            if line != HEADER:
                raise DamagedError(f"{path}, line 1: {line[:80]!r} is no header of an order")
            continue
        try:
            # Most of a long file is passed over: the second field is enough to know.
            if iterations is None or int(line.split(",", 2)[1]) in iterations:
                yield from_line(line)
        except (DamagedError, ValueError, IndexError) as error:
            raise DamagedError(f"{path}, line {number}: {error}") from None


def _findings(path: Path) -> tuple[Finding, ...]:
    findings: list[Finding] = []
    if not path.exists():
        return ()
    for number, line in _lines(path):
        try:
            findings.append(finding_from_line(line))
        except DamagedError as error:
            raise DamagedError(f"{path}, line {number}: {error}") from None
    return tuple(findings)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the whole lines with their numbers: one without its end is still being written."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                yield number, line.decode()
    except OSError as error:
        raise DamagedError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DamagedError(f"{path}: {error}") from None
