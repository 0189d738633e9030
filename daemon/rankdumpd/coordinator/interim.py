"""Stands in for the merge, the files and the hints as they will be; these go by the same names."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankdump.contract.findings import Finding, FindingKind
from rankdump.contract.order import COLUMNS, ORDER_FILE, ORDER_FOLDER, from_row, to_row
from rankdump.contract.status import OrderEntry
from rankdump.contract.timeouts import TimeoutHint
from rankdumpd.coordinator import merge as merging
from rankdumpd.coordinator.values import Book, GlobalOrder, IterationView, JobFacts

_FINDINGS_FILE = "findings.jsonl"


def merge(view: IterationView) -> GlobalOrder:
    """Return the order of an iteration."""
    order = merging.merge(view.events, iteration=view.iteration, excluded=view.excluded)
    found = tuple(
        Finding(FindingKind.CONFLICT, view.iteration, str(text), provisional=view.provisional)
        for text in order.findings
    )
    return dataclasses.replace(order, findings=found)


class Publisher:
    """Appends to the files of every job."""

    def append(
        self, order: GlobalOrder, *, job_id: str, root: str, book: Book | None
    ) -> tuple[Book | None, str]:
        """Write an iteration; return the new book, or why there is none."""
        position = book.position if book else 0
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows(map(to_row, order.entries(position)))
        header = ",".join(COLUMNS) + "\n"
        try:
            if not root:
                raise OSError(f"no report has named the tree of job {job_id!r}")
            book = _appended(root, ORDER_FILE, header, text.getvalue(), book)
        except OSError as error:
            problem = f"{len(order)} entries could not be published: {error}"
            return None, f"iteration {order.iteration}: {problem}"
        return dataclasses.replace(book, position=position + len(order)), ""


def note(
    findings: Sequence[Finding], *, job_id: str, root: str, book: Book | None
) -> tuple[Book | None, str]:
    """Write findings beside the order; return the new book, and why they could not be written."""
    if not findings:
        return book, ""
    lines = "".join(json.dumps(dataclasses.asdict(finding)) + "\n" for finding in findings)
    try:
        return _appended(root, _FINDINGS_FILE, "", lines, book), ""
    except OSError as error:
        return book, f"{len(findings)} findings of {job_id} could not be published: {error}"


def published(book: Book, graph: int | None = None) -> Iterator[OrderEntry]:
    """Return the committed entries."""
    data = (Path(book.root) / ORDER_FOLDER / ORDER_FILE).read_bytes()[: book.sizes[ORDER_FILE]]
    for row in csv.DictReader(io.StringIO(data.decode())):
        entry = from_row(row)
        if graph in (None, entry.graph):
            yield entry


def _appended(root: str, name: str, header: str, text: str, book: Book | None) -> Book:
    folder = Path(root) / ORDER_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    size = book.sizes.get(name, 0) if book else 0
    data = ("" if size else header) + text
    with (folder / name).open("ab", buffering=0) as file:
        os.ftruncate(file.fileno(), size)
        file.write(data.encode())
    sizes = {**(book.sizes if book else {}), name: size + len(data.encode())}
    return Book(root, sizes, book.position if book else 0)


@dataclass(frozen=True, slots=True)
class HintState:
    """How many iterations were observed."""

    iterations: int = 0

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps({"iterations": self.iterations})

    @staticmethod
    def from_json(text: str) -> HintState:
        """Read it back."""
        return HintState(**json.loads(text)) if text else HintState()


def observed(state: HintState, order: GlobalOrder) -> HintState:
    """Return the state after an iteration."""
    return HintState(state.iterations + (order.iteration >= 0))


def hints_of(state: HintState, facts: JobFacts) -> tuple[TimeoutHint, ...]:
    """Return no hints."""
    return ()


def waiting(view: IterationView, facts: JobFacts, now_us: int) -> tuple[TimeoutHint, ...]:
    """Return no hints."""
    return ()


def warnings(hints: Sequence[TimeoutHint]) -> tuple[str, ...]:
    """Return the reason of each hint."""
    return tuple(hint.reason for hint in hints)


def write_hints(root: str, job_id: str, hints: Sequence[TimeoutHint]) -> str:
    """Return why nothing was written: there is no reason."""
    return ""
