"""Conversions of tensors from the formats of an Ascend device into plain ones, and back. Pure.

    NCHW NHWC HWCN NCDHW NDHWC DHWCN      every axis whole, in this order
    NC1HWC0        [n][c/C0][h][w][c%C0]
    NDC1HWC0       [n][d][c/C0][h][w][c%C0]
    FRACTAL_Z      [c/C0][h][w][n/16][n%16][c%C0]        the first three in one extent
    FRACTAL_Z_3D   [d][c/C0][h][w][n/16][n%16][c%C0]     the first four in one extent
    FRACTAL_NZ     [...][w/C0][h/16][h%16][w%C0]         of [...][h][w]

A format cuts one axis into blocks of C0 elements, pads the last block and reorders the blocks;
nothing is computed. So a conversion is a view of the same bytes with its axes in another order,
cropped by msaccucmp's rules, and one copy of that view. In FRACTAL_NZ a vector is the first row of
its blocks. In FRACTAL_Z of a grouped convolution several groups share a block, each on its own
diagonal: for G groups with `cin` channels and `cout` filters each, one block holds E groups, the
smallest number that fills blocks of C0 by 16. Source: CANN, msaccucmp and the GE format transfers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from rankdump._kernels.array_kernels import copy_array
from rankdump.errors import CorruptedError, UnsupportedError

TileArray: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class TensorTiles:
    """A tensor in its memory layout, with its axes in the wanted order."""

    view: TileArray
    split: int | None = None
    """Index of the axis that is divided into blocks; the axis after it has the elements of a block.
    None if no axis is divided.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the axes, including the padding of the last block."""
        shape, at = self.view.shape, self.split
        if at is None:
            return shape
        return (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])

    def reorder(self, order: Sequence[int]) -> TensorTiles:
        """Return the tiles with their axes in another order; axes are numbered as in `shape`."""
        at = self.split
        if at is None:
            return TensorTiles(transpose_axes(self.view, order))
        axes: list[int] = []
        for axis in order:
            axes += [at, at + 1] if axis == at else [axis + (axis > at)]
        return TensorTiles(transpose_axes(self.view, axes), list(order).index(at))

    def copy_elements(self, shape: tuple[int, ...]) -> TileArray:
        """Return the first elements of each axis as a contiguous array of this shape."""
        whole = np.empty(shape, self.view.dtype)
        for place, part in self._pairs(whole):
            copy_array(place, part)
        return whole

    def fill_from(self, whole: TileArray) -> None:
        """Copy a tensor of at most this shape into the tiles; the padding is not changed."""
        for place, part in self._pairs(whole):
            copy_array(part, place)

    def _pairs(self, whole: TileArray) -> Iterator[tuple[TileArray, TileArray]]:
        """Yield pieces of a tensor with their places in the tiles: whole blocks, then the rest."""
        at, view = self.split, self.view
        if at is None:
            yield whole, view[tuple(map(slice, whole.shape))]
            return
        before, behind = whole.shape[:at], whole.shape[at + 1 :]
        block = view.shape[at + 1]
        blocks, rest = divmod(whole.shape[at], block)
        lead, tail = tuple(map(slice, before)), tuple(map(slice, behind))
        full = whole[(*lead, slice(blocks * block))].reshape(*before, blocks, block, *behind)
        yield full, view[(*lead, slice(blocks), slice(block), *tail)]
        if rest:
            last = whole[(*lead, slice(blocks * block, None))]
            yield last, view[(*lead, blocks, slice(rest), *tail)]


def transpose_axes(array: TileArray, axes: Sequence[int]) -> TileArray:
    """Return a view with the axes in another order."""
    return cast("TileArray", array.transpose(tuple(axes)))


CUBE_SIZE = 16
"""Number of rows of a block; also C0 for elements of more than one byte on the device."""
BYTE_CUBE_SIZE = 32
"""C0 for elements of one byte."""


@dataclass(frozen=True, slots=True)
class OriginalLayout:
    """Layout of a tensor before the device changed it."""

    shape: tuple[int, ...] = ()
    """Shape in the format that the tensor is converted to, as msaccucmp takes it; empty
    if unknown.
    """
    groups: int = 0
    """Number of groups of a grouped convolution; 0 and 1 mean none."""
    c0: int = 0
    """Elements of a block; 0 means that of the shape, or the usual number for the size of an
    element.
    """


def name_extents(letters: str, origin: OriginalLayout) -> dict[str, int]:
    """Return the original extents by their letters; CorruptedError if their number differs."""
    if len(origin.shape) != len(letters) or 0 in origin.shape:
        raise CorruptedError(
            f"the original shape is {origin.shape}, but {letters} needs {len(letters)} extents "
            "above 0, and this format cannot be read without it"
        )
    return dict(zip(letters, origin.shape, strict=True))


def get_block_size(shape: tuple[int, ...], origin: OriginalLayout, source: str) -> int:
    """Return C0, which is the last extent; CorruptedError if the header contradicts itself."""
    c0 = shape[-1]
    if c0 == 0 or origin.c0 not in (0, c0):
        declared = f", but its format word declares {origin.c0}" if origin.c0 else ""
        raise CorruptedError(f"{source} of shape {shape} has blocks of {c0}{declared}")
    return c0


def get_usual_block_size(item_bytes: int, origin: OriginalLayout) -> int:
    """Return C0 for a plain tensor that is to be laid out in blocks (GE's rule)."""
    return origin.c0 or (BYTE_CUBE_SIZE if item_bytes == 1 else CUBE_SIZE)


def check_dimensions(shape: tuple[int, ...], rank: int, source: str) -> None:
    """Raise CorruptedError for a shape that has another number of extents than its format."""
    if len(shape) != rank:
        raise CorruptedError(f"{source} needs {rank} extents, but the shape is {shape}")


FLAT_ORDERS = ("NCHW", "NHWC", "HWCN")
DEEP_ORDERS = ("NCDHW", "NDHWC", "DHWCN")


def _open_plain(letters: str, wanted: str, array: TileArray, origin: OriginalLayout) -> TensorTiles:
    """Return the tiles of a tensor of one plain order in another plain order."""
    check_dimensions(array.shape, len(letters), letters)
    return _order_tiles(TensorTiles(array), letters, wanted)


def _open_channels(wanted: str, array: TileArray, origin: OriginalLayout) -> TensorTiles:
    """Return the tiles of an NC1HWC0 tensor, or for an order with a depth of an NDC1HWC0 one, in a
    plain order.
    """
    is_deep = "D" in wanted
    source, letters, split = ("NDC1HWC0", "NDCHW", 2) if is_deep else ("NC1HWC0", "NCHW", 1)
    check_dimensions(array.shape, len(letters) + 1, source)
    get_block_size(array.shape, origin, source)
    return _order_tiles(TensorTiles(np.moveaxis(array, -1, split + 1), split), letters, wanted)


def _open_fractal_z(wanted: str, array: TileArray, origin: OriginalLayout) -> TensorTiles:
    """Return the tiles of a FRACTAL_Z or FRACTAL_Z_3D tensor without groups in a plain order."""
    source = "FRACTAL_Z_3D" if "D" in wanted else "FRACTAL_Z"
    check_dimensions(array.shape, 4, source)
    c0 = get_block_size(array.shape, origin, source)
    extents = {"D": 1, **name_extents(wanted, origin)}
    blocks = -(-extents["C"] // c0)
    outer = (extents["D"], blocks, extents["H"], extents["W"])
    first, columns, rows = array.shape[:3]
    is_smallest_fit = (columns - 1) * rows < extents["N"] <= columns * rows
    if math.prod(outer) != first or not is_smallest_fit:
        raise CorruptedError(
            f"{source} of shape {array.shape} cannot hold {wanted} of {origin.shape}"
        )
    view = transpose_axes(array.reshape(*outer, columns * rows, c0), (0, 4, 1, 5, 2, 3))
    if "D" in wanted:
        return _order_tiles(TensorTiles(view, 2), "DNCHW", wanted)
    return _order_tiles(TensorTiles(view[0], 1), "NCHW", wanted)


def _read_fractal_z(
    wanted: str, array: TileArray, origin: OriginalLayout
) -> TensorTiles | TileArray:
    read = _open_fractal_z if origin.groups < 2 else _read_grouped
    return read(wanted, array, origin)


def _lay_out_channels(letters: str, array: TileArray, origin: OriginalLayout) -> TileArray:
    """Lay a plain tensor out as NC1HWC0, or as NDC1HWC0 when it has a depth."""
    extents = _list_extents(letters, array)
    c0 = get_usual_block_size(array.itemsize, origin)
    lead = [extents[letter] for letter in "ND" if letter in letters]
    made = np.zeros((*lead, -(-extents["C"] // c0), extents["H"], extents["W"], c0), array.dtype)
    _open_channels(letters, made, OriginalLayout()).fill_from(array)
    return made


def _lay_out_fractal_z(letters: str, array: TileArray, origin: OriginalLayout) -> TileArray:
    """Lay a plain tensor out as FRACTAL_Z, or as FRACTAL_Z_3D when it has a depth."""
    if origin.groups >= 2 and "D" not in letters:
        return _lay_out_grouped(letters, array, origin)
    extents = _list_extents(letters, array)
    c0 = get_usual_block_size(array.itemsize, origin)
    outer = -(-extents["C"] // c0) * extents["H"] * extents["W"] * extents.get("D", 1)
    made = np.zeros((outer, -(-extents["N"] // CUBE_SIZE), CUBE_SIZE, c0), array.dtype)
    _open_fractal_z(letters, made, OriginalLayout(array.shape)).fill_from(array)
    return made


def _list_extents(letters: str, array: TileArray) -> dict[str, int]:
    check_dimensions(array.shape, len(letters), letters)
    return name_extents(letters, OriginalLayout(array.shape))


def _order_tiles(tiles: TensorTiles, letters: str, wanted: str) -> TensorTiles:
    return tiles.reorder([letters.index(letter) for letter in wanted])


_FRACTAL_Z = "FRACTAL_Z"


@dataclass(frozen=True, slots=True)
class GroupedLayout:
    """Layout of the groups of one tensor of a grouped convolution."""

    groups: int
    cin: int
    cout: int
    height: int
    width: int
    c0: int

    @property
    def together(self) -> int:
        """Number of groups in one block."""
        in_blocks = math.lcm(self.cin, self.c0) // self.cin
        out_blocks = math.lcm(self.cout, CUBE_SIZE) // self.cout
        return min(math.lcm(in_blocks, out_blocks), self.groups)

    @property
    def extents(self) -> tuple[int, int, int, int, int, int]:
        """Extents on the device: blocks of groups, C1, H, W, filters, C0."""
        blocks = -(-self.groups // self.together)
        c1 = -(-self.together * self.cin // self.c0)
        filters = -(-self.together * self.cout // CUBE_SIZE) * CUBE_SIZE
        return blocks, c1, self.height, self.width, filters, self.c0

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the tensor on the device."""
        blocks, c1, height, width, filters, c0 = self.extents
        return blocks * c1 * height * width, filters // CUBE_SIZE, CUBE_SIZE, c0


def _read_grouped(wanted: str, array: TileArray, origin: OriginalLayout) -> TileArray:
    """Return a FRACTAL_Z tensor with groups in a plain order."""
    check_dimensions(array.shape, 4, _FRACTAL_Z)
    extents = name_extents(wanted, origin)
    c0 = get_block_size(array.shape, origin, _FRACTAL_Z)
    plan = _make_grouped_layout(extents, origin.groups, c0)
    if plan.shape != array.shape:
        raise CorruptedError(
            f"{_FRACTAL_Z} of shape {array.shape} cannot hold {wanted} of {origin.shape} in "
            f"{origin.groups} groups: that takes {plan.shape}"
        )
    whole = np.empty(origin.shape, array.dtype)
    blocks = array.reshape(plan.extents)
    for filters, part in _iterate_pieces(_as_nchw(whole, wanted), blocks, plan):
        copy_array(filters, part)
    return whole


def _lay_out_grouped(letters: str, array: TileArray, origin: OriginalLayout) -> TileArray:
    """Lay a plain tensor out as FRACTAL_Z with groups."""
    extents = _list_extents(letters, array)
    c0 = get_usual_block_size(array.itemsize, origin)
    plan = _make_grouped_layout(extents, origin.groups, c0)
    made = np.zeros(plan.extents, array.dtype)
    for filters, part in _iterate_pieces(_as_nchw(array, letters), made, plan):
        copy_array(part, filters)
    return made.reshape(plan.shape)


def _make_grouped_layout(extents: dict[str, int], groups: int, c0: int) -> GroupedLayout:
    filters = extents["N"]
    if filters % groups:
        raise CorruptedError(f"{filters} filters do not divide into {groups} groups")
    return GroupedLayout(groups, extents["C"], filters // groups, extents["H"], extents["W"], c0)


def _iterate_pieces(
    whole: TileArray, blocks: TileArray, plan: GroupedLayout
) -> Iterator[tuple[TileArray, TileArray]]:
    """Yield pieces of filters (n, c, h, w) with their places; each piece lies in one block."""
    for group in range(plan.groups):
        block, within = divmod(group, plan.together)
        filters = slice(group * plan.cout, (group + 1) * plan.cout)
        rows = slice(within * plan.cout, (within + 1) * plan.cout)
        first, channel = within * plan.cin, 0
        while channel < plan.cin:
            c1, at = divmod(first + channel, plan.c0)
            count = min(plan.c0 - at, plan.cin - channel)
            part = blocks[block, c1, :, :, rows, at : at + count]
            yield whole[filters, channel : channel + count], transpose_axes(part, (2, 3, 0, 1))
            channel += count


def _as_nchw(array: TileArray, letters: str) -> TileArray:
    return transpose_axes(array, [letters.index(letter) for letter in "NCHW"])


_FRACTAL_NZ = "FRACTAL_NZ"
_MIN_FRACTAL_NZ_DIMENSIONS = 4


def _open_fractal_nz(array: TileArray, origin: OriginalLayout) -> TensorTiles:
    """Return the tiles of a FRACTAL_NZ tensor as matrices, or as a vector if the original shape is
    one.
    """
    if array.ndim < _MIN_FRACTAL_NZ_DIMENSIONS:
        raise CorruptedError(
            f"{_FRACTAL_NZ} has {_MIN_FRACTAL_NZ_DIMENSIONS} extents or more, but the shape is "
            f"{array.shape}"
        )
    c0 = get_block_size(array.shape, origin, _FRACTAL_NZ)
    *lead, columns, rows, height, _ = array.shape
    if height == 0:
        raise CorruptedError(f"{_FRACTAL_NZ} of shape {array.shape} has blocks of no rows")
    _check_original_shape(
        origin.shape, (*lead, rows * height, columns * c0), height, c0, array.shape
    )
    view = np.moveaxis(array.reshape(*lead, columns, rows * height, c0), -3, -2)
    if len(origin.shape) == 1:
        return TensorTiles(view[0], 0)
    return TensorTiles(view, len(lead) + 1)


def _lay_out_fractal_nz(array: TileArray, origin: OriginalLayout) -> TileArray:
    """Lay matrices or a vector out as FRACTAL_NZ."""
    c0 = get_usual_block_size(array.itemsize, origin)
    *lead, height, width = (1,) * (2 - array.ndim) + array.shape
    made = np.zeros((*lead, -(-width // c0), -(-height // CUBE_SIZE), CUBE_SIZE, c0), array.dtype)
    _open_fractal_nz(made, OriginalLayout()).fill_from(array.reshape(*lead, height, width))
    return made


def _check_original_shape(
    wanted: tuple[int, ...],
    padded: tuple[int, ...],
    height: int,
    width: int,
    shape: tuple[int, ...],
) -> None:
    """Raise CorruptedError for an original shape that would have other blocks."""
    if not wanted:
        return
    vector = len(wanted) == 1 and len(padded) == 2 and padded[0] == height
    least = (*padded[:-2], padded[-2] - height + 1, padded[-1] - width + 1)
    checked = (padded[0], *wanted) if vector else wanted
    fits = len(checked) == len(padded) and all(
        low <= extent <= high for low, extent, high in zip(least, checked, padded, strict=True)
    )
    if not fits:
        allowed = ",".join(
            str(high) if low == high else f"{low}-{high}"
            for low, high in zip(least, padded, strict=True)
        )
        raise CorruptedError(
            f"{_FRACTAL_NZ} of shape {shape} cannot hold a tensor of {wanted}; it holds ({allowed})"
        )


def _crop_shape(shape: tuple[int, ...], original: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape without padding; None if the original shape is not a part of it.

    The original shape is taken in its own order, not in that of the target, with ones appended. If
    nothing is padded there is nothing to crop, whatever the order.
    """
    if not original or math.prod(original) == math.prod(shape):
        return shape
    wanted = original + (1,) * (len(shape) - len(original))
    if len(wanted) > len(shape) or not all(0 < w <= s for w, s in zip(wanted, shape, strict=True)):
        return None
    return wanted


@dataclass(frozen=True, slots=True)
class ConvertedTensor:
    """A tensor in its new format, C-contiguous."""

    array: TileArray
    has_padding: bool = False
    """Whether padding was kept because the original shape is not a part of the result."""


FormatConversion: TypeAlias = "Callable[[TileArray, OriginalLayout], TensorTiles | TileArray]"
"""Returns tiles whose padding is still to be cropped, or the final tensor."""


def convert_format(
    array: TileArray, source: str, target: str, origin: OriginalLayout | None = None
) -> ConvertedTensor:
    """Return a tensor with a device's shape in another format, its padding cropped.

    UnsupportedError if there is no such conversion, CorruptedError if shape, original shape and
    format contradict each other. Nothing larger than the tensor with its padding is allocated.
    """
    if source == target:
        return ConvertedTensor(np.ascontiguousarray(array))
    conversion = CONVERSIONS.get((source, target))
    if conversion is None:
        known = ", ".join(list_target_formats(source)) or "nothing"
        raise UnsupportedError(f"{source} cannot be converted to {target}, only to {known}")
    origin = origin or OriginalLayout()
    found = conversion(array, origin)
    if not isinstance(found, TensorTiles):
        return ConvertedTensor(found)
    part = _crop_shape(found.shape, origin.shape)
    return ConvertedTensor(found.copy_elements(part or found.shape), has_padding=part is None)


def list_target_formats(source: str) -> tuple[str, ...]:
    """Return the formats that tensors of a format can be converted to."""
    return tuple(target for known, target in CONVERSIONS if known == source)


def _make_conversions() -> dict[tuple[str, str], FormatConversion]:
    found: dict[tuple[str, str], FormatConversion] = {}
    for wanted in FLAT_ORDERS:
        found["NC1HWC0", wanted] = partial(_open_channels, wanted)
        found["FRACTAL_Z", wanted] = partial(_read_fractal_z, wanted)
        found[wanted, "NC1HWC0"] = partial(_lay_out_channels, wanted)
        found[wanted, "FRACTAL_Z"] = partial(_lay_out_fractal_z, wanted)
        # Matrices have no letters, so the content of FRACTAL_NZ is the same in all of these orders.
        if wanted != "HWCN":
            found["FRACTAL_NZ", wanted] = _open_fractal_nz
    for wanted in DEEP_ORDERS:
        found["NDC1HWC0", wanted] = partial(_open_channels, wanted)
        found["FRACTAL_Z_3D", wanted] = partial(_open_fractal_z, wanted)
        found[wanted, "NDC1HWC0"] = partial(_lay_out_channels, wanted)
        found[wanted, "FRACTAL_Z_3D"] = partial(_lay_out_fractal_z, wanted)
    for letters, wanted in (*permutations(FLAT_ORDERS, 2), *permutations(DEEP_ORDERS, 2)):
        found[letters, wanted] = partial(_open_plain, letters, wanted)
    found["NDC1HWC0", "ND"] = found["NDC1HWC0", "NCDHW"]
    found["FRACTAL_NZ", "ND"] = _open_fractal_nz
    found["ND", "FRACTAL_NZ"] = _lay_out_fractal_nz
    return found


CONVERSIONS = _make_conversions()
"""Conversions by source and target format."""
TARGET_FORMATS = tuple(sorted({target for _, target in CONVERSIONS}))
