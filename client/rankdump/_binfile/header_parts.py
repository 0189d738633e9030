"""Header of CANN's `bin` files as frozen values: one operator's tensors, buffers and workspaces
(CANN, `dump_data.proto`). Pure: nothing here needs protobuf.

The classes have the names of the messages, by which they are looked up. Numbers and fields that a
newer release adds are kept, the fields as bytes in `extra`, so a header can be written as it was
read.
"""

from __future__ import annotations

from dataclasses import dataclass

HEADER_VERSION = "2.0"


@dataclass(frozen=True, slots=True)
class Shape:
    """Extents, outermost first; of a scalar there are none."""

    dim: tuple[int, ...] = ()
    extra: bytes = b""


@dataclass(frozen=True, slots=True)
class OriginalOp:
    """The operator of the framework that an output comes from."""

    name: str = ""
    output_index: int = 0
    data_type: int = 0
    format: int = 0
    extra: bytes = b""


@dataclass(frozen=True, slots=True)
class DimRange:
    """Bounds of an extent that is known at run time only."""

    dim_start: int = 0
    dim_end: int = 0
    extra: bytes = b""


@dataclass(frozen=True, slots=True)
class OpInput:
    """A tensor that the operator read."""

    data_type: int = 0
    """A number of `DATA_TYPES`."""
    format: int = 0
    """A number of `FORMAT_NAMES`, with a C0 code in bits 24 to 27 and groups in 8 to 23, or 0."""
    shape: Shape | None = None
    """Its shape on the device."""
    data: bytes = b""
    """Empty on disk: the payload follows the header."""
    size: int = 0
    """Bytes of the payload."""
    original_shape: Shape | None = None
    """In the format of the operator itself."""
    sub_format: int = 0
    """Number of groups of FRACTAL_Z."""
    address: int = 0
    offset: int = 0
    arg_index: int = 0
    input_type: int = 0
    extra: bytes = b""

    @property
    def is_placeholder(self) -> bool:
        """Whether it only keeps the slot of a tensor that was not dumped."""
        return _is_placeholder(self)


@dataclass(frozen=True, slots=True)
class OpOutput:
    """A tensor that the operator wrote; fields as those of `OpInput`."""

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
        """Whether it only keeps the slot of a tensor that was not dumped."""
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
    """Microseconds since the epoch: the time stamp in the file's name."""
    output: tuple[OpOutput, ...] = ()
    input: tuple[OpInput, ...] = ()
    buffer: tuple[OpBuffer, ...] = ()
    op_name: str = ""
    """The framework's name, not sanitised."""
    attr: tuple[OpAttr, ...] = ()
    space: tuple[Workspace, ...] = ()
    dfx_message: str = ""
    """Text of the log, in the dump of an exception."""
    extra: bytes = b""
