"""Statistics of the records of an api dump, from the info file of their rank, which has a line for
each tensor of all iterations. A line has no time: it is the record's by its step and name, and of
several with one name the last lines are those of the records, in the order of time.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rankdump._analysis.reader.manifest_columns import ManifestColumns, read_manifest_columns
from rankdump._analysis.reader.statistic_tables import INFO_ITEMS, spell_info_values
from rankdump._analysis.reader.table_text import read_blocks_backward
from rankdump._analysis.table.tree_access import TreeAccess
from rankdump._core.manifest import Manifest, parse_manifest_name
from rankdump._core.plan import plan_from_json
from rankdump._layout import api_tree
from rankdump._layout.api_files import SUMMARY_ITEMS, InfoLine, parse_info_line
from rankdump._layout.api_tree import (
    ApiPlace,
    make_api_rank_folder,
    parse_info_file_name,
    parse_place,
)
from rankdump._layout.tree_layouts import LAYOUTS
from rankdump._layout.tree_paths import MANIFEST_FOLDER
from rankdump.errors import CorruptedError, ProtocolError

_OTHER = -1
"""In place of a record of other manifests."""
_LINE_START = re.compile(rb'\["(?:[^"\\]|\\.)*", ([0-9]{1,19}), ')


class InfoStatistics(NamedTuple):
    """Statistics of a record."""

    record: int
    """Its number."""
    timestamp_us: int
    side: str
    slot: int
    values: dict[str, str]
    """By title."""


def read_info_statistics(
    access: TreeAccess,
    read: ManifestColumns,
    manifests: npt.NDArray[np.int64],
    problems: list[str],
) -> Iterator[InfoStatistics]:
    """Yield the statistics of the records of some manifests, given by their number.

    Adds a problem for a file that is damaged where these records are.
    """
    by_rank: defaultdict[int, list[int]] = defaultdict(list)
    for number in manifests.tolist():
        by_rank[read.manifests[number].status.rank].append(number)
    for rank, numbers in by_rank.items():
        folder, names = make_api_rank_folder(rank), list[str]()
        with suppress(OSError):
            names = sorted(filter(parse_info_file_name, access.listing(folder)))
        records = _RecordLines(read, numbers, _read_others(access, folder, read, numbers))
        for name in names:
            path = f"{access.root}/{folder}/{name}"
            try:
                with access.open(folder, name) as file:
                    for block in read_blocks_backward(file):
                        records.add(block.lines, f"{path}, from byte {block.start}")
                        if not records.is_waiting:
                            break
            except OSError as error:
                problems.append(f"{path}: cannot be read: {error.strerror}")
        problems += records.problems[:1]
        yield from records.finish()


class _RecordLines:
    """Records of one rank, and their lines as far as they were found."""

    def __init__(
        self, read: ManifestColumns, manifests: list[int], others: ManifestColumns
    ) -> None:
        """`others` are manifests of the same iterations, whose records have lines as well."""
        self.problems: list[str] = []
        self._places: dict[int, ApiPlace] = {}
        self._given: dict[int, frozenset[str]] = {}
        """Statistics that the line of a record has, though they may be NaN."""
        self._lines: dict[int, InfoLine] = {}
        self._stamps: list[int] = read.records.column("timestamp_us").to_pylist()
        named: defaultdict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
        for manifest, record, op_name, argument in _iter_records(read, manifests):
            place = parse_place(argument)
            if place is not None:
                name = api_tree.spell_api_tensor_name(op_name, place)
                named[manifest.status.iteration, name].append((self._stamps[record], record))
                self._places[record] = place
                self._given[record] = _find_items(manifest.session.plan if manifest.session else "")
        stamps: list[int] = others.records.column("timestamp_us").to_pylist()
        for manifest, record, op_name, argument in _iter_records(others, range(len(others.paths))):
            if (place := parse_place(argument)) is not None:
                name = api_tree.spell_api_tensor_name(op_name, place)
                if (manifest.status.iteration, name) in named:
                    named[manifest.status.iteration, name].append((stamps[record], _OTHER))
        self._waiting = {key: sorted(records) for key, records in named.items()}
        """Times and records without a line, by iteration and name, the latest at the end."""
        self._steps = {iteration for iteration, _ in named}

    @property
    def is_waiting(self) -> bool:
        """Whether a record has no line yet."""
        return bool(self._waiting)

    def add(self, lines: bytes, where: str) -> None:
        """Add lines, after all that follow them in the file."""
        for text in reversed(lines.split(b"\n")):
            found = _LINE_START.match(text)
            if not text.strip() or (found is not None and int(found[1]) not in self._steps):
                continue
            try:
                line = parse_info_line(text.decode("utf-8", "backslashreplace"), file=where)
            except CorruptedError as error:
                self.problems.append(str(error))
                continue
            records = self._waiting.get((line.step, line.name))
            if records is not None:
                _, record = records.pop()
                if record != _OTHER:
                    self._lines[record] = line
                if not records:
                    del self._waiting[line.step, line.name]

    def finish(self) -> Iterator[InfoStatistics]:
        """Yield the statistics of the records whose lines were found."""
        # Where no plan says what is recorded, it is what any line has.
        seen = {item for line in self._lines.values() for item in line.statistics}
        for record, line in self._lines.items():
            place = self._places[record]
            values = spell_info_values(line, self._given[record] | seen)
            slot = api_tree.get_slot(place)
            yield InfoStatistics(record, self._stamps[record], place.side.value, slot, values)


def _read_others(
    access: TreeAccess, folder: str, read: ManifestColumns, manifests: list[int]
) -> ManifestColumns:
    """Return the other manifests of the iterations of some, as of another attempt."""
    iterations = {read.manifests[number].status.iteration for number in manifests}
    own = {read.paths[number] for number in manifests}
    found: list[str] = []
    with suppress(OSError):
        for name in access.listing(f"{folder}/{MANIFEST_FOLDER}"):
            path, iteration = f"{folder}/{MANIFEST_FOLDER}/{name}", parse_manifest_name(name)
            if iteration in iterations and path not in own:
                found.append(path)
    return read_manifest_columns(access, found, [])


def _iter_records(
    read: ManifestColumns, manifests: Iterable[int]
) -> Iterator[tuple[Manifest, int, str, str]]:
    """Yield manifest, number, operator and argument of each record of some manifests."""
    names = ("op_name", "argument")
    starts = np.searchsorted(read.manifest_of, np.arange(len(read.manifests) + 1)).tolist()
    for number in manifests:
        start, end = starts[number], starts[number + 1]
        rows = read.records.slice(start, end - start)
        columns = (rows.column(name).to_pylist() for name in names)
        for at, values in enumerate(zip(*columns, strict=True), start):
            yield (read.manifests[number], at, *values)


@lru_cache(maxsize=64)
def _find_items(plan: str) -> frozenset[str]:
    """Return the statistics that the info file of a plan has; none where it cannot be read."""
    with suppress(ProtocolError, KeyError):
        known = plan_from_json(plan.encode())
        files = LAYOUTS[known.output.layout].api_files
        items = INFO_ITEMS if files is not None and files.extended else SUMMARY_ITEMS
        return frozenset(known.content.statistics).intersection(items)
    return frozenset()
