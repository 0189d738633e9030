"""Operators of torch for collectives and messages (`c10d::allreduce_` and the others), with the
places of their arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

from rankdump._core.events import EventKind


@dataclass(frozen=True, slots=True)
class CollectiveOperator:
    """Kind and arguments of an operator, by their places, as in torch 2.13."""

    kind: EventKind
    group: int
    """Place of the process group."""
    sized: int | None = None
    """Place of the tensors whose element count is reported: it is equal on all members."""
    peer: int | None = None
    """Place of the rank in the group at the other end of a message."""
    inputs: int | None = None
    """Place of the tensors that it reads."""
    outputs: int | None = None
    """Place of the tensors that it writes; that of the inputs if it works in place."""
    root: int | None = None
    """Place of the rank in the group that alone reads, or alone gets a result."""


def _in_place(kind: EventKind, root: int | None = None) -> CollectiveOperator:
    return CollectiveOperator(kind, 1, sized=0, inputs=0, outputs=0, root=root)


def _between(kind: EventKind, sized: int | None, root: int | None = None) -> CollectiveOperator:
    return CollectiveOperator(kind, 2, sized=sized, inputs=1, outputs=0, root=root)


_GATHER = _between(EventKind.ALL_GATHER, 1)
_REDUCE_SCATTER = _between(EventKind.REDUCE_SCATTER, 1)
# Members may exchange parts of different sizes, so there is no common count.
_ALL_TO_ALL = _between(EventKind.ALL_TO_ALL, None)
_BARRIER = CollectiveOperator(EventKind.BARRIER, 1)
COLLECTIVE_OPERATORS = {
    "allreduce_": _in_place(EventKind.ALL_REDUCE),
    "allreduce_coalesced_": _in_place(EventKind.ALL_REDUCE),
    "broadcast_": _in_place(EventKind.BROADCAST, root=2),
    "reduce_": _in_place(EventKind.REDUCE, root=3),
    "allgather_": _GATHER,
    "_allgather_base_": _GATHER,
    "allgather_coalesced_": _GATHER,
    "allgather_into_tensor_coalesced_": _GATHER,
    "reduce_scatter_": _REDUCE_SCATTER,
    "_reduce_scatter_base_": _REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced_": _REDUCE_SCATTER,
    "gather_": _between(EventKind.GATHER, 1, root=3),
    "scatter_": _between(EventKind.SCATTER, 0, root=3),
    "alltoall_": _ALL_TO_ALL,
    "alltoall_base_": _ALL_TO_ALL,
    "barrier": _BARRIER,
    "monitored_barrier_": _BARRIER,
    "send": CollectiveOperator(EventKind.SEND, 1, sized=0, peer=2, inputs=0),
    "recv_": CollectiveOperator(EventKind.RECV, 1, sized=0, peer=2, outputs=0),
    "recv_any_source_": CollectiveOperator(EventKind.RECV, 1, sized=0, outputs=0),
}
"""Operators of the namespace `c10d` (torch/csrc/distributed/c10d/Ops.cpp), by name."""
