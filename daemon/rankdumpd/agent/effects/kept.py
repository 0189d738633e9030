"""What the ledger keeps of tensors, as rows of their tables and as records of the manifest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rankdump.contract.figure_rows import FigureRows, TensorKind
from rankdump.contract.key import TensorKey
from rankdump.contract.layout import operator_csv, statistic_csv
from rankdump.contract.layout.layouts import Layout
from rankdump.contract.layout.mindspore_sync import STATISTIC_FILE
from rankdump.contract.layout.place import Place
from rankdump.contract.manifest import ManifestRecord
from rankdump.contract.plan import UNNAMED
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
            rows = figure_rows_again(piece.raw)
            by_operator = session.plan.content.tables == "operator"
            found_rows = _operator_rows if by_operator else _folder_rows
            yield from found_rows(rows, _kept(rows, piece), session)


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


def _folder_rows(rows: FigureRows, kept: Iterable[_Row], session: Session) -> Iterator[TableRow]:
    layout, stand = session.outlet.layout, session.outlet.stand
    tables: dict[tuple[str, int, bool], Place] = {}
    for kind, timestamp_us, figures in kept:
        where = _model(kind, session), kind.graph, kind.constant
        if where not in tables:
            net_name, graph, constant = where
            folder = layout.folder_of(
                stand,
                rank=session.request.rank,
                net_name=net_name,
                graph=graph,
                iteration=rows.iteration,
                constant=constant,
            )
            tables[where] = Place(folder, STATISTIC_FILE)
        text = statistic_csv.figure_row(
            kind, timestamp_us, figures, stand.profile, unknown_id=layout.unknown_id
        )
        yield TableRow(tables[where], text)


def _operator_rows(rows: FigureRows, kept: Iterable[_Row], session: Session) -> Iterator[TableRow]:
    layout, stand = session.outlet.layout, session.outlet.stand
    for kind, timestamp_us, figures in kept:
        key = TensorKey(
            rank=session.request.rank,
            net_name=_model(kind, session),
            graph=kind.graph,
            iteration=rows.iteration,
            timestamp_us=timestamp_us,
            op_type=kind.op_type,
            op_name=kind.op_name,
            side=kind.side,
            slot=kind.slot,
            task=layout.unknown_id,
            stream=layout.unknown_id,
            constant=kind.constant,
        )
        table = layout.operator_place(key, stand, operator_csv.SUFFIX)
        text = operator_csv.row(kind, layout.tensor_format(kind.shape), figures)
        yield TableRow(table, text)


def _model(kind: TensorKind, session: Session) -> str:
    return session.plan.output.net_name or kind.model or UNNAMED


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
