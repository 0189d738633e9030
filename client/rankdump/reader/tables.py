"""A `statistic.csv` to typed rows that know their operators. Reads one table at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from rankdump.contract.errors import DamagedError
from rankdump.contract.key import TensorKey
from rankdump.contract.layout import statistic_csv
from rankdump.contract.manifest import ManifestRecord
from rankdump.contract.statistics import ITEMS
from rankdump.reader.entry import Entry, Table, Tree

_NONFINITE_COUNTS = tuple(
    ITEMS[item] for item in ("nan count", "negative inf count", "positive inf count")
)
_NULL = "null"
"""What releases up to 2.2 write where no finite element is left."""

Recorded = Mapping[tuple[int, int], ManifestRecord]
"""What the manifests say of a tensor, by rank and time stamp: both are unique together."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One row."""

    key: TensorKey
    """As the table spells it; `op_name` below is the raw one where it is known."""
    dtype: str
    shape: tuple[int, ...]
    data_bytes: int
    values: Mapping[str, str]
    """Text of each figure by the title of its column."""
    relative: str
    """Path of the table below the root, with `/`."""
    record: ManifestRecord | None = None
    """What the manifest says; None for a row that no manifest names."""

    @property
    def op_type(self) -> str:
        """Type of the operator, raw where a manifest knows it."""
        return self.record.op_type if self.record else self.key.op_type

    @property
    def op_name(self) -> str:
        """Scope name of the operator, raw where a manifest knows it."""
        return self.record.op_name if self.record else self.key.op_name

    def number(self, item: str) -> float | None:
        """Return a figure by its name in `statistic_category`; None when the row has none."""
        text = self.values.get(ITEMS[item], _NULL)
        try:
            return None if text == _NULL else float(text)
        except ValueError:
            return None

    @property
    def finite(self) -> bool | None:
        """Whether every element is; None when the columns of the table cannot tell.

        The counts tell, and so do both extremes: a NaN makes them NaN.
        """
        texts = self.values
        if all(title in texts for title in _NONFINITE_COUNTS):
            return all(texts[title] == "0" for title in _NONFINITE_COUNTS)
        extremes = [self.number(item) for item in ("max", "min")]
        known = [number for number in extremes if number is not None]
        if not all(math.isfinite(number) for number in known):
            return False
        return True if len(known) == len(extremes) else None


def recorded(tree: Tree) -> Recorded:
    """Return what the manifests of a tree say, for `rows`."""
    return {
        (manifest.status.rank, record.timestamp_us): record
        for manifest in tree.manifests
        for record in manifest.records
    }


def rows(table: Table, known: Recorded) -> Iterator[Figures]:
    """Yield the rows of one table, in its order; DamagedError names the line at fault.

    A last line without an end is such a line, after all others: it is torn, or being written.
    """
    try:
        text = table.path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise DamagedError(f"{table.path}: cannot be read: {error.strerror}") from None
    whole, _, torn = text.rpartition("\n")
    for row in statistic_csv.parse(whole, file=str(table.path)):
        yield Figures(
            key=TensorKey(
                rank=table.rank,
                net_name=table.net_name,
                graph=table.graph,
                iteration=table.iteration,
                timestamp_us=row.timestamp_us,
                op_type=row.op_type,
                op_name=row.op_name,
                side=row.side,
                slot=row.slot,
                task=row.task,
                stream=row.stream,
                constant=table.constant,
            ),
            dtype=row.dtype,
            shape=row.shape,
            data_bytes=row.data_bytes,
            values=dict(row.values),
            relative=table.relative,
            record=known.get((table.rank, row.timestamp_us)),
        )
    if torn:
        raise DamagedError(f"{table.path}: its last line has no end: {torn[:60]!r}")


def named(tree: Tree, keeps: Callable[[Entry | Figures], bool]) -> tuple[Entry | Figures, ...]:
    """Return every tensor that has a file, and those with a row where no files are, as they ran."""
    entries = tuple(entry for entry in tree.entries if keeps(entry))
    filed = {entry.folder for entry in tree.entries}
    tables = [table for table in tree.tables if table.folder not in filed]
    if not tables:
        return entries
    known = recorded(tree)
    tabled = (row for table in tables for row in rows(table, known) if keeps(row))
    return tuple(sorted((*entries, *tabled), key=lambda tensor: _in_time(tensor.key)))


def _in_time(key: TensorKey) -> tuple[int, bool, int, int]:
    return key.rank, not key.constant, key.iteration, key.timestamp_us
