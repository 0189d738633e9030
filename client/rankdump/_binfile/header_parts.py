"""Header of CANN's `bin` files as frozen values: tensors, buffers and workspaces of one operator
(CANN, `dump_data.proto`). Pure: nothing in this module requires protobuf.

The classes have the names of the protobuf messages, by which they are looked up. Unknown numbers
and fields of a newer release are kept, the fields as bytes in `extra`, so a header can be written
as it was read.
"""

from __future__ import annotations

from dataclasses import dataclass

HEADER_VERSION = "2.0"


@dataclass(frozen=True, slots=True)
class Shape:
    """Extents of a tensor, outermost first; a scalar has none."""

    dim: tuple[int, ...] = ()
    extra: bytes = b""


@dataclass(frozen=True, slots=True)
class OriginalOp:
    """Operator of the framework that an output comes from."""

    name: str = ""
    output_index: int = 0
    data_type: int = 0
    format: int = 0
    extra: bytes = b""


@dataclass(frozen=True, slots=True)
class DimRange:
    """Bounds of an extent that is known only at run time."""

    dim_start: int = 0
    dim_end: int = 0
    extra: bytes = b""


@dataclass(frozen=True, slots=True)
class OpInput:
    """A tensor that the operator read."""

    data_type: int = 0
    """Element type as a number of `DATA_TYPES`."""
    format: int = 0
    """Format as a number of `FORMAT_NAMES`, with a code of C0 in bits 24 to 27 and groups in bits 8
    to 23, or 0.
    """
    shape: Shape | None = None
    """Shape of the tensor on the device."""
    data: bytes = b""
    """Bytes of the tensor; empty on disk, where the payload follows the header."""
    size: int = 0
    """Size of the payload in bytes."""
    original_shape: Shape | None = None
    """Shape in the format of the operator itself."""
    sub_format: int = 0
    """Number of groups in FRACTAL_Z."""
    address: int = 0
    offset: int = 0
    arg_index: int = 0
    input_type: int = 0
    extra: bytes = b""

    @property
    def is_placeholder(self) -> bool:
        """Whether the entry only keeps the slot of a tensor that was not dumped."""
        return _is_placeholder(self)


@dataclass(frozen=True, slots=True)
class OpOutput:
    """A tensor that the operator wrote; its fields have the meaning of those of `OpInput`."""

    data_type: int = 0
    format: int = 0
    shape: Shape | None = None
    original_op: OriginalOp | None = None
    data: bytes = b""
    size: int = 0
    original_shape: Shape | None = None
    sub_format: int = 0
    address: int = 0
    dim_range: tuple[DimRange, ...] = ()
    offset: int = 0
    extra: bytes = b""

    @property
    def is_placeholder(self) -> bool:
        """Whether the entry only keeps the slot of a tensor that was not dumped."""
        return _is_placeholder(self)


def _is_placeholder(part: OpInput | OpOutput) -> bool:
    return not (part.data_type or part.size or (part.shape and part.shape.dim))


@dataclass(frozen=True, slots=True)
class OpBuffer:
    """A buffer on the chip; type 0 is L1."""

    buffer_type: int = 0
    data: bytes = b""
    size: int = 0
    extra: bytes = b""


@dataclass(frozen=True, slots=True)
class OpAttr:
    """An attribute of the operator."""

    name: str = ""
    value: str = ""
    extra: bytes = b""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Scratch memory of the operator; type 0 is a log."""

    type: int = 0
    data: bytes = b""
    size: int = 0
    extra: bytes = b""


@dataclass(frozen=True, slots=True)
class DumpData:
    """The header of a `bin` file."""

    version: str = HEADER_VERSION
    dump_time: int = 0
    """Time in microseconds since the epoch, which is also the time stamp in the file's name."""
    output: tuple[OpOutput, ...] = ()
    input: tuple[OpInput, ...] = ()
    buffer: tuple[OpBuffer, ...] = ()
    op_name: str = ""
    """Operator name of the framework, without replaced characters."""
    attr: tuple[OpAttr, ...] = ()
    space: tuple[Workspace, ...] = ()
    dfx_message: str = ""
    """Text of the device's log, in the dump of an exception."""
    extra: bytes = b""
