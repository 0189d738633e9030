"""What the ledger keeps of tensors, as rows of their tables and as records of the manifest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rankdump.contract.figure_rows import FigureRows, TensorKind
from rankdump.contract.layout import mindspore_sync as layout
from rankdump.contract.layout import statistic_csv
from rankdump.contract.manifest import ManifestRecord
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
            yield from _rows(figure_rows_again(piece.raw), piece, session)


def manifest_records(
    kept: Iterable[KeptRecord | KeptFrame],
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
                records.append(_record(kind, timestamp_us))
    return graphs, tuple(records)


def _rows(rows: FigureRows, frame: KeptFrame, session: Session) -> Iterator[TableRow]:
    rank, net_name = session.request.rank, session.plan.output.net_name
    profile = session.outlet.profile
    folders: dict[tuple[int, bool], str] = {}
    for kind, timestamp_us, figures in _kept(rows, frame):
        place = kind.graph, kind.constant
        if place not in folders:
            folders[place] = layout.folder_of(
                rank, net_name, kind.graph, rows.iteration, constant=kind.constant
            )
        text = statistic_csv.figure_row(kind, timestamp_us, figures, profile)
        yield TableRow(folders[place], text)


def _kept(rows: FigureRows, frame: KeptFrame) -> Iterator[_Row]:
    all_of_them = zip(rows.kinds, rows.timestamps_us, rows.figures, strict=True)
    if not frame.refused:
        return all_of_them
    refused = {place for places in frame.refused.values() for place in places}
    return (row for place, row in enumerate(all_of_them) if place not in refused)


def _record(kind: TensorKind, timestamp_us: int) -> ManifestRecord:
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
    )
