"""Heads of records from the keys of their files."""

from __future__ import annotations

from rankdump._core.record import TensorKey, TensorKind
from rankdump._core.session_protocol import RecordHead


def head_of(
    key: TensorKey,
    dtype: str = "uint8",
    shape: tuple[int, ...] = (),
    byte_count: int = 1,
    *,
    argument: str = "",
    switched_on: bool = False,
) -> RecordHead:
    """Return the head of a record whose `key` is this one."""
    kind = TensorKind(
        key.graph,
        key.op_type,
        key.op_name,
        key.side,
        key.slot,
        dtype,
        shape,
        byte_count,
        argument,
        key.constant,
        key.net_name,
    )
    return RecordHead(
        kind, key.iteration, key.timestamp_us, key.rank, key.task, key.stream, switched_on
    )
