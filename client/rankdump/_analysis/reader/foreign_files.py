"""Files that other tools wrote, one for each rank, in a folder or in subfolders for steps, and
their tensors as entries and rows of statistics.

The time stamp of a tensor is its number among the tensors of its file, from 1, so time stamps
follow the execution order. The facts that the tool has about a tensor become its record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rankdump._analysis.reader.file_errors import named_errors
from rankdump._analysis.reader.tree import Entry, Figures, Table
from rankdump._core.manifest import ManifestRecord
from rankdump._core.record import TensorKey
from rankdump._core.statistics import STATISTIC_TITLES
from rankdump._layout.foreign_calls import (
    FOREIGN_TITLES,
    CallPlace,
    ForeignCall,
    ForeignTensor,
    count_bytes,
)

_MAX_START_BYTES = 4096
_MAX_LISTED = 1 << 16
"""Largest number of files of a folder that are examined; a folder with more is no dump of these
tools.
"""
_SUFFIXES = ("", ".json", ".log", ".txt", ".pkl", ".pickle")
"""Suffixes of files that are opened; files with tensors of other dumps have other suffixes."""


def find_marked_files(root: Path, is_wanted: Callable[[bytes], bool]) -> Iterator[Path]:
    """Yield the root, or the files in it and in its subfolders, whose beginning `is_wanted`
    accepts, by name.
    """
    if root.is_file():
        yield from (path for path in (root,) if is_wanted(read_start(path)))
        return
    for item in _list_items(root):
        for path in _list_items(item) if item.is_dir() else (item,):
            if path.suffix in _SUFFIXES and path.is_file() and is_wanted(read_start(path)):
                yield path


def read_foreign_file(path: Path) -> bytes:
    """Return the bytes of a file; CorruptedError when it cannot be read."""
    with named_errors(path):
        return path.read_bytes()


def _list_items(folder: Path) -> list[Path]:
    try:
        items = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:
        return []
    return items[:_MAX_LISTED]


def read_start(path: Path) -> bytes:
    """Return the first bytes of a file; none if the file cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_MAX_START_BYTES)
    except OSError:
        return b""


_TITLES = STATISTIC_TITLES | FOREIGN_TITLES


def make_entries(
    root: Path,
    place: CallPlace,
    folder: str,
    calls: Sequence[ForeignCall],
    file_bytes: Mapping[str, int],
) -> Iterator[Entry]:
    """Yield the tensors that have a file in a folder below the root; other tensors are left out.

    `file_bytes` contains the sizes of the folder's files by name.
    """
    for number, call, tensor in _number_tensors(calls):
        size = file_bytes.get(tensor.file)
        if tensor.file and size is not None:
            path = f"{folder}/{tensor.file}"
            record = _make_record(path, number, call, tensor, size)
            yield Entry(root, path, _make_key(place, number, call, tensor), size, record)


def make_rows(table: Table, calls: Sequence[ForeignCall]) -> Iterator[Figures]:
    """Yield a row with the known statistics for each tensor of a file."""
    place = CallPlace(table.rank, table.iteration)
    for number, call, tensor in _number_tensors(calls):
        values = {_TITLES[item]: repr(value) for item, value in tensor.statistics.items()}
        yield Figures(
            key=_make_key(place, number, call, tensor),
            dtype=tensor.dtype,
            shape=tensor.shape,
            data_bytes=count_bytes(tensor.dtype, tensor.shape),
            values=values,
            relative=table.relative,
            record=_make_record("", number, call, tensor, 0),
        )


def _number_tensors(
    calls: Sequence[ForeignCall],
) -> Iterator[tuple[int, ForeignCall, ForeignTensor]]:
    number = 0
    for call in calls:
        for tensor in call.tensors:
            number += 1
            yield number, call, tensor


def _make_key(place: CallPlace, number: int, call: ForeignCall, tensor: ForeignTensor) -> TensorKey:
    return TensorKey(
        rank=place.rank,
        net_name="",
        graph=0,
        iteration=place.iteration,
        timestamp_us=number,
        op_type=call.op_type,
        op_name=call.name,
        side=tensor.side,
        slot=tensor.slot,
        argument=tensor.argument or tensor.side.value,
    )


def _make_record(
    path: str, number: int, call: ForeignCall, tensor: ForeignTensor, size: int
) -> ManifestRecord:
    return ManifestRecord(
        path=path,
        timestamp_us=number,
        op_type=call.op_type,
        op_name=call.op_name,
        argument=tensor.argument,
        dtype=tensor.dtype,
        shape=tensor.shape,
        bytes_in=count_bytes(tensor.dtype, tensor.shape),
        bytes_stored=size,
        digest=tensor.digest,
    )
