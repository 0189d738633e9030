"""Elements of one tensor: its file in the tree, a slice of it, and the file to download."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rankdump._analysis.plot.chart_data import ElementHistogram, count_elements
from rankdump._analysis.plot.chart_rows import ChartRefusal
from rankdump._analysis.plot.tensor_slice import TensorSlice, cut_slice
from rankdump._analysis.reader.tensor_loader import load
from rankdump._analysis.reader.tree import Entry
from rankdump._analysis.reader.tree_walk import locate
from rankdump._core.units import format_bytes
from rankdump._web.dump_source import DumpSource
from rankdump._web.page_kinds import AbsentPageError, ParameterError
from rankdump._web.png_image import color_cells, encode_png
from rankdump._web.tensor_rows import TensorRow
from rankdump.errors import ExhaustedError

MAX_ELEMENT_BYTES = 128 << 20
"""Elements of one tensor that a page reads; larger ones are for `rankdump show`."""


class SliceChoice(NamedTuple):
    """Dimensions and place of a slice, as an address names them."""

    row_axis: int | None
    column_axis: int | None
    at: tuple[int, ...]
    """Index in each dimension; empty for the first ones."""
    is_joined: bool
    """Whether shards are joined to the logical tensor."""


class ElementView(NamedTuple):
    """What a page shows of the elements of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    slice: TensorSlice | None
    """None for elements that are not numbers, and for none."""
    histogram: ElementHistogram | None
    note: str
    """Why there is no histogram; empty where there is one."""


def find_entry(source: DumpSource, row: TensorRow) -> Entry:
    """Return the file of a row; AbsentPageError where there are statistics alone.

    The path comes from a table, and so does not lead out of the tree by itself.
    """
    if not row.path:
        raise AbsentPageError("the tree has statistics of this tensor, and no elements")
    root = source.root.resolve()
    path = (root / row.path).resolve()
    if not path.is_relative_to(root):
        raise AbsentPageError(f"the path {row.path[:60]!r} of the table leads out of the tree")
    found = [each for each in locate(root / row.path) if each.member == row.member]
    if not found:
        raise AbsentPageError(f"the file {row.path} is not in the tree any more")
    return found[0]


def load_elements(source: DumpSource, row: TensorRow, *, is_joined: bool) -> npt.NDArray[Any]:
    """Return the elements of a row; ExhaustedError for more than a page reads."""
    entry = find_entry(source, row)
    record = entry.record
    size = row.bytes
    if is_joined and record is not None and record.layout is not None:
        size = row.bytes * len(record.layout.mesh.list_ranks())
    if size > MAX_ELEMENT_BYTES:
        raise ExhaustedError(
            f"the tensor has {format_bytes(size)}, and a page reads at most "
            f"{format_bytes(MAX_ELEMENT_BYTES)}: rankdump show {entry.path}"
        )
    if is_joined:
        return source.dump.load(entry, full=True)
    return load(entry, limit_bytes=2 * MAX_ELEMENT_BYTES)


def view_elements(source: DumpSource, row: TensorRow, choice: SliceChoice) -> ElementView:
    """Return slice and histogram of a tensor; ParameterError for a slice that it does not have."""
    tensor = load_elements(source, row, is_joined=choice.is_joined)
    is_numeric = tensor.dtype.kind in "biufc" and tensor.size > 0
    cut = choose_slice(tensor, choice) if is_numeric else None
    if not is_numeric or tensor.dtype.kind == "c":
        note = (
            "no elements" if not tensor.size else f"elements of type {tensor.dtype} have no order"
        )
        return ElementView(tensor.shape, str(tensor.dtype), cut, None, note)
    found = count_elements(tensor, "this tensor")
    if isinstance(found, ChartRefusal):
        return ElementView(tensor.shape, str(tensor.dtype), cut, None, found.reason)
    return ElementView(tensor.shape, str(tensor.dtype), cut, found, "")


def choose_slice(tensor: npt.NDArray[Any], choice: SliceChoice) -> TensorSlice:
    """Return a slice; the last two dimensions at the first place, where an address does not say."""
    count = tensor.ndim
    rows = max(0, count - 2) if choice.row_axis is None else choice.row_axis
    columns = max(0, count - 1) if choice.column_axis is None else choice.column_axis
    for name, axis in (("rows", rows), ("columns", columns)):
        if axis >= max(1, count):
            raise ParameterError(name, str(axis), f"a dimension from 0 to {max(0, count - 1)}")
    if count > 1 and rows == columns:
        raise ParameterError("columns", str(columns), f"another dimension than rows, {rows}")
    at = choice.at or (0,) * count
    _check_place(at, tensor.shape)
    return cut_slice(tensor, rows, columns, at)


def _check_place(at: Sequence[int], shape: Sequence[int]) -> None:
    text = ",".join(map(str, at))
    if len(at) != len(shape):
        raise ParameterError("at", text, f"{len(shape)} numbers, one for each dimension")
    for index, extent in zip(at, shape, strict=True):
        if index >= extent:
            limits = ", ".join(str(extent - 1) for extent in shape)
            raise ParameterError("at", text, f"indices up to {limits}")


def draw_slice(source: DumpSource, row: TensorRow, choice: SliceChoice) -> bytes:
    """Return a slice as PNG."""
    tensor = load_elements(source, row, is_joined=choice.is_joined)
    if tensor.dtype.kind not in "biufc" or not tensor.size:
        raise AbsentPageError("the tensor has no elements that can be drawn")
    return encode_png(color_cells(choose_slice(tensor, choice).cells))


def make_npy(source: DumpSource, row: TensorRow, *, is_joined: bool) -> bytes:
    """Return the elements as an npy file; bfloat16 as float32."""
    file = io.BytesIO()
    np.save(file, load_elements(source, row, is_joined=is_joined))
    return file.getvalue()
