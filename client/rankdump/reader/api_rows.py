"""Lines of an info file to rows that know their calls, and to the files of the same tensors."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from rankdump.contract.dtypes import ELEMENT_TYPES
from rankdump.contract.errors import DamagedError
from rankdump.contract.key import TensorKey
from rankdump.contract.layout import api_tree
from rankdump.contract.layout.api_info import SUMMARY, element_of
from rankdump.contract.layout.api_name import place_of
from rankdump.contract.manifest import Manifest
from rankdump.contract.statistics import ITEMS, MD5
from rankdump.reader.entry import Table
from rankdump.reader.figures import Figures
from rankdump.reader.infos import Noted, read_info
from rankdump.reader.manifests import Said

_FIGURES = (*SUMMARY, "l2norm")

ByName: TypeAlias = "Mapping[tuple[int, int, str], list[Said]]"
"""What manifests say of a tensor of an api dump, by rank, iteration and name."""


def named_calls(manifests: Iterable[Manifest]) -> ByName:
    """Return what the manifests of an api dump say."""
    found: defaultdict[tuple[int, int, str], list[Said]] = defaultdict(list)
    for manifest in manifests:
        status = manifest.status
        for record in manifest.records:
            place = place_of(record.argument)
            if place is not None:
                name = api_tree.spelt(record.op_name, place)
                found[status.rank, status.iteration, name].append((status, record))
    return found


def info_rows(table: Table, known: ByName) -> Iterator[Figures]:
    """Yield the rows of an info file; DamagedError, after all others, for a line that is none."""
    info = read_info(table.path, stepped=any(rank == table.rank for rank, _, _ in known))
    seen: Counter[tuple[int, int, str]] = Counter()
    given = info.given
    for noted in info.lines:
        where = table.rank, noted.iteration, noted.line.name
        every = known.get(where, [])
        said = every[min(seen[where], len(every) - 1)] if every else None
        seen[where] += 1
        row = _row(noted, table, said, given)
        if row is not None:
            yield row
    if info.damage:
        raise DamagedError(info.damage)


def _row(noted: Noted, table: Table, said: Said | None, given: frozenset[str]) -> Figures | None:
    line = noted.line
    file = api_tree.file_of(f"{line.name}.npy")
    if file is None:
        return None
    dtype = element_of(line.dtype)
    values = {ITEMS[item]: repr(value) for item, value in line.figures.items()}
    if dtype != "bool":
        values |= {ITEMS[i]: repr(math.nan) for i in _FIGURES if i in given - set(line.figures)}
    if line.md5:
        values[ITEMS[MD5]] = line.md5
    element = ELEMENT_TYPES.get(dtype)
    return Figures(
        key=TensorKey(
            rank=table.rank,
            net_name="",
            graph=0,
            iteration=noted.iteration,
            timestamp_us=noted.number if said is None else said[1].timestamp_us,
            op_type=file.op_type,
            op_name=file.op_name,
            side=file.side,
            slot=file.slot,
            argument=file.argument,
        ),
        dtype=dtype,
        shape=line.shape,
        data_bytes=math.prod(line.shape) * (element.item_bytes if element is not None else 0),
        values=values,
        relative=table.relative,
        record=None if said is None else said[1],
    )


class Placed:
    """When the tensors of files that no manifest names were dumped, by the info file beside."""

    def __init__(self, root: Path, *, stepped: bool) -> None:
        self._root, self._stepped = root, stepped
        self._known: dict[str, dict[str, Noted]] = {}

    def of(self, folder: str, name: str) -> tuple[int, int]:
        """Return iteration and place in time of a file's tensor; those with no line come last."""
        if folder not in self._known:
            self._known[folder] = self._lines(folder)
        lines = self._known[folder]
        noted = lines.get(name.removesuffix(".zst").removesuffix(".npy"))
        if noted is not None:
            return noted.iteration, noted.number
        last = next(reversed(lines.values()), None)
        return (0, 0) if last is None else (last.iteration, last.number + 1)

    def _lines(self, folder: str) -> dict[str, Noted]:
        for ending in ("pkl", "csv"):
            path = self._root / f"{folder}_info.{ending}"
            if path.is_file():
                try:
                    info = read_info(path, stepped=self._stepped)
                except DamagedError:  # said of the table itself
                    return {}
                return {noted.line.name: noted for noted in info.lines}
        return {}
