"""What the ledger keeps of tensors, as rows of their tables and as records of the manifest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rankdump.contract.figure_rows import FigureRows, TensorKind
from rankdump.contract.layout.layouts import Layout
from rankdump.contract.manifest import ManifestRecord
from rankdumpd.agent.members import member_text
from rankdumpd.agent.receive import figure_rows_again
from rankdumpd.agent.sessions import Session
from rankdumpd.agent.values import KeptFrame, KeptRecord, KeptRow, TableRow

_Row = tuple[TensorKind, int, str]


def rows_of_tables(found: Iterable[KeptRow | KeptFrame], session: Session) -> Iterator[TableRow]:
    """Yield the lines of tables, in the order of the frames."""
    for piece in found:
        if isinstance(piece, KeptRow):
            yield piece.row
        else:
            rows, of_row = figure_rows_again(piece.raw), session.outlet.lines.of_row
            for kind, timestamp_us, figures in _kept(rows, piece):
                yield of_row(kind, timestamp_us, figures, rows.iteration)


def manifest_records(
    kept: Iterable[KeptRecord | KeptFrame], layout: Layout
) -> tuple[set[int], tuple[ManifestRecord, ...]]:
    """Return the graphs of what is kept of an iteration, and its records."""
    graphs: set[int] = set()
    records: list[ManifestRecord] = []
    for each in kept:
        if isinstance(each, KeptRecord):
            graphs.add(each.graph)
            records.append(each.record)
        else:
            for kind, timestamp_us, _ in _kept(figure_rows_again(each.raw), each):
                graphs.add(kind.graph)
                records.append(_record(kind, timestamp_us, layout))
    return graphs, tuple(records)


def _kept(rows: FigureRows, frame: KeptFrame) -> Iterator[_Row]:
    all_of_them = zip(rows.kinds, rows.timestamps_us, rows.figures, strict=True)
    if not frame.refused:
        return all_of_them
    refused = {place for places in frame.refused.values() for place in places}
    return (row for place, row in enumerate(all_of_them) if place not in refused)


def _record(kind: TensorKind, timestamp_us: int, layout: Layout) -> ManifestRecord:
    return ManifestRecord(
        path="",
        timestamp_us=timestamp_us,
        op_type=kind.op_type,
        op_name=kind.op_name,
        argument=kind.argument,
        dtype=kind.dtype,
        shape=kind.shape,
        bytes_in=0,
        bytes_stored=0,
        digest="",
        member=member_text(kind.side, kind.slot) if layout.shares_stamps else "",
    )
