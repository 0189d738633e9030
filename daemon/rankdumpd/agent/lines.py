"""How a tensor's figures stand as a line of a table, for each tree and plan. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

from rankdump.contract.figure_rows import TensorKind
from rankdump.contract.key import Side, TensorKey
from rankdump.contract.layout import api_info, api_tree, operator_csv, statistic_csv
from rankdump.contract.layout.api_name import ApiPlace, place_of
from rankdump.contract.layout.layouts import Layout
from rankdump.contract.layout.mindspore_sync import STATISTIC_FILE
from rankdump.contract.layout.place import Place, Stand
from rankdump.contract.plan import UNNAMED, DumpPlan
from rankdumpd.agent.values import Examined, TableRow

_MOST_FOLDERS = 1024
_MOST_PLACES = 1024


class Lines(Protocol):
    """The tables of one session."""

    @property
    def header(self) -> str:
        """First line of a table; empty where it has none."""
        ...

    @property
    def items(self) -> tuple[str, ...]:
        """Figures of a line, by the names of `contract.statistics`."""
        ...

    def of_record(self, record: Examined, place: Place) -> TableRow | None:
        """Return the line of a tensor whose file stands there; None when it has none."""
        ...

    def of_row(self, kind: TensorKind, timestamp_us: int, figures: str, iteration: int) -> TableRow:
        """Return the line of a tensor of which only figures came, joined by commas."""
        ...


def lines_of(plan: DumpPlan, layout: Layout, stand: Stand, rank: int) -> Lines:
    """Return the tables that a plan asks for, whether or not it has figures."""
    content = plan.content
    if layout.api is not None:
        table = Place(layout.rank_folder(rank), layout.api.info)
        return InfoLines(content.statistics, layout.api, table)
    about = _About(rank, plan.output.net_name, layout, stand)
    if content.tables == "operator":
        return OperatorLines(content.statistics, about)
    return FolderLines(statistic_csv.items_of(content.statistics, stand.profile), about)


@dataclass(frozen=True, slots=True)
class _About:
    """What all lines of a session have in common."""

    rank: int
    net_name: str
    layout: Layout
    stand: Stand

    def model(self, kind: TensorKind) -> str:
        """Return the name of a tensor's model."""
        return self.net_name or kind.model or UNNAMED


@dataclass(frozen=True, slots=True)
class FolderLines:
    """One `statistic.csv` in each folder."""

    items: tuple[str, ...]
    about: _About
    _tables: dict[tuple[str, int, int, bool], Place] = field(
        default_factory=dict[tuple[str, int, int, bool], Place]
    )

    @property
    def header(self) -> str:
        """First line of a table."""
        return statistic_csv.header(self.items)

    def of_record(self, record: Examined, place: Place) -> TableRow | None:
        """Return the line of a tensor whose file stands there; None when it has none."""
        if record.figures is None:
            return None
        text = statistic_csv.row(record.head, record.figures, self.about.stand.profile)
        return TableRow(Place(place.folder, STATISTIC_FILE), text)

    def of_row(self, kind: TensorKind, timestamp_us: int, figures: str, iteration: int) -> TableRow:
        """Return the line of a tensor of which only figures came."""
        about = self.about
        text = statistic_csv.figure_row(
            kind,
            timestamp_us,
            figures,
            about.stand.profile,
            unknown_id=about.layout.unknown_id,
        )
        return TableRow(self._table(kind, iteration), text)

    def _table(self, kind: TensorKind, iteration: int) -> Place:
        about = self.about
        where = about.model(kind), kind.graph, iteration, kind.constant
        table = self._tables.get(where)
        if table is None:
            folder = about.layout.folder_of(
                about.stand,
                rank=about.rank,
                net_name=where[0],
                graph=kind.graph,
                iteration=iteration,
                constant=kind.constant,
            )
            if len(self._tables) >= _MOST_FOLDERS:
                self._tables.clear()
            table = self._tables[where] = Place(folder, STATISTIC_FILE)
        return table


@dataclass(frozen=True, slots=True)
class OperatorLines:
    """A table of each operator, in the place of its file."""

    items: tuple[str, ...]
    about: _About

    @property
    def header(self) -> str:
        """First line of a table."""
        return operator_csv.header(self.items)

    def of_record(self, record: Examined, place: Place) -> TableRow | None:
        """Return nothing: operators with a table have no file."""
        return None

    def of_row(self, kind: TensorKind, timestamp_us: int, figures: str, iteration: int) -> TableRow:
        """Return the line of a tensor of which only figures came."""
        about = self.about
        layout = about.layout
        key = TensorKey(
            rank=about.rank,
            net_name=about.model(kind),
            graph=kind.graph,
            iteration=iteration,
            timestamp_us=timestamp_us,
            op_type=kind.op_type,
            op_name=kind.op_name,
            side=kind.side,
            slot=kind.slot,
            task=layout.unknown_id,
            stream=layout.unknown_id,
            constant=kind.constant,
        )
        table = layout.operator_place(key, about.stand, operator_csv.SUFFIX)
        text = operator_csv.row(kind, layout.tensor_format(kind.shape), figures)
        return TableRow(table, text)


@dataclass(frozen=True, slots=True)
class InfoLines:
    """The info file of an api dump: one of each rank, and a line for every tensor."""

    items: tuple[str, ...]
    files: api_tree.ApiFiles
    table: Place

    @property
    def header(self) -> str:
        """Return nothing: it has no header."""
        return ""

    def of_record(self, record: Examined, place: Place) -> TableRow:
        """Return the line of a tensor with a file; one that has no figures has a line as well."""
        return self._line(record.head.kind, record.head.iteration, record.figures or ())

    def of_row(self, kind: TensorKind, timestamp_us: int, figures: str, iteration: int) -> TableRow:
        """Return the line of a tensor of which only figures came."""
        values = tuple(figures.split(",")) if figures else ()
        return self._line(kind, iteration, values)

    def _line(self, kind: TensorKind, iteration: int, values: tuple[str, ...]) -> TableRow:
        place = _place(kind.argument, kind.side, kind.slot)
        text = api_info.line(
            self.files,
            name=api_tree.spelt(kind.op_name, place),
            step=iteration,
            place=place,
            dtype=kind.dtype,
            shape=kind.shape,
            figures=dict(zip(self.items, values, strict=False)),
        )
        return TableRow(self.table, text)


@lru_cache(maxsize=_MOST_PLACES)
def _place(argument: str, side: Side, slot: int) -> ApiPlace:
    return place_of(argument) or ApiPlace(side, str(slot))
