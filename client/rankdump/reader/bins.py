"""A bin file to its tensors; a listing reads its header only."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rankdump.contract.dtypes import ELEMENT_TYPES, as_stored
from rankdump.contract.dump_types import format_word
from rankdump.contract.dumpdata import OpInput, OpOutput
from rankdump.contract.errors import DamagedError, UnsupportedError
from rankdump.contract.key import Side
from rankdump.contract.manifest import ManifestRecord
from rankdump.reader.elements import element_of
from rankdump.reader.entry import Described

_UNDEFINED = 0
_REMEMBERED = 1 << 14


def described(path: Path) -> Iterator[tuple[Side, int, Described]]:
    """Yield the tensors that a file's header names; DamagedError when it cannot be read.

    Slots that were not dumped have a place and nothing in it.
    """
    # With protobuf, which a tree without bin files is read without.
    from rankdump import dumpdata

    header = dumpdata.open_header(path)
    sides = (Side.INPUT, header.input), (Side.OUTPUT, header.output)
    for side, parts in sides:
        for slot, part in enumerate(parts):
            if not part.placeholder:
                dims = part.shape.dim if part.shape else ()
                original = part.original_shape.dim if part.original_shape else ()
                facts = part.data_type, dims, part.format, original, part.size, part.sub_format
                yield side, slot, _described(header.op_name, *facts)


# The same operators come again in every iteration.
@lru_cache(maxsize=_REMEMBERED)
def _described(
    op_name: str,
    data_type: int,
    shape: tuple[int, ...],
    word: int,
    original_shape: tuple[int, ...],
    size: int,
    groups: int,
) -> Described:
    dtype, laid = element_of(data_type), format_word(word)
    where = laid.name, original_shape, size, groups or laid.groups, laid.c0
    return Described(op_name, dtype, shape, *where)


def load_member(path: Path, member: str, record: ManifestRecord | None) -> npt.NDArray[Any]:
    """Return one tensor in the shape it had on the device.

    DamagedError when it is not there or not what it should be, UnsupportedError for elements
    that are no numbers.
    """
    from rankdump import dumpdata

    file = dumpdata.open_bin(path)
    for payload in file.payloads:
        part = payload.part
        if f"{payload.kind}.{payload.index}" == member and isinstance(part, OpInput | OpOutput):
            data = file.bytes_of(payload)
            try:
                return _array(part, data, record)
            except UnsupportedError as error:
                raise UnsupportedError(f"{path}: {member}: {error}") from None
            except (DamagedError, ValueError) as error:
                raise DamagedError(f"{path}: {member}: {error}") from None
    raise DamagedError(f"{path}: no {member} in it")


def _array(
    part: OpInput | OpOutput, data: memoryview, record: ManifestRecord | None
) -> npt.NDArray[Any]:
    element = ELEMENT_TYPES.get(record.dtype) if record else None
    if record is not None and part.data_type == _UNDEFINED and element is not None:
        # CANN has no number for this type; the manifest knows what the bytes are.
        tensor = np.frombuffer(as_stored(record.dtype, data), dtype=element.descr)
        tensor.flags.writeable = False
        return tensor.reshape(record.shape)
    from rankdump import dumpdata

    tensor = dumpdata.array(part, data)
    # CANN has no scalars.
    scalar = record is not None and record.shape == () and tensor.shape == (1,)
    return tensor.reshape(()) if scalar else tensor
