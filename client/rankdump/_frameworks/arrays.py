"""Plain arrays as tensors, and operators whose arrays a script passes individually.

An array is a numpy array or anything that numpy can view without a copy. Consecutive arrays with
one operator name belong to one operator, which ends when the next operator begins. Constants wait
for the first armed iteration.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from rankdump._core.element_types import ElementType, convert_to_stored, get_element_type
from rankdump._core.graph import GraphNode, SourceLine, TensorType
from rankdump._core.plan import StatisticPrecision
from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import (
    UNDIVIDED_PASS,
    DeferredStatistics,
    DeviceCopier,
    Recorder,
    StartedEvent,
    TensorObservation,
    TensorSource,
    TensorVersion,
)
from rankdump._core.selection import extract_op_type
from rankdump._core.tensor_layout import TensorLayout
from rankdump._frameworks.model_observer import capture_source_lines
from rankdump._frameworks.operator_names import PARAMETER_TYPE, is_gradient
from rankdump._kernels.array_kernels import MIN_STREAMED_BYTES, stream_memory
from rankdump._kernels.element_moments import find_address
from rankdump.errors import UnsupportedError

_MAX_SMALL_BYTES = 1 << 14


class ArraySource:
    """Source of a numpy array, or of anything that `numpy.asarray` takes without copying.

    It is a view and no copy: elements are read when they are used. Strings, objects and times raise
    UnsupportedError, because an npy file could hold them only with code that runs on loading.
    """

    def __init__(self, array: npt.ArrayLike, dtype: str = "") -> None:
        """`dtype` is the name of the element type if the array's dtype is another one, as for
        float8 kept as `uint8`.
        """
        self._array: npt.NDArray[Any] = np.asarray(array)
        self._type, self._little = _find_types(self._array.dtype, dtype)
        self.dtype = self._type.name
        """Common name of the element type."""
        self.shape: tuple[int, ...] = self._array.shape
        """Extents of the dimensions, outermost first."""
        self.byte_count: int = self._array.size * self._type.item_bytes
        """Bytes of the elements without gaps."""
        self.layout: TensorLayout | None = None
        """Part of a logical tensor that the array is; None for a whole tensor."""

    def copy_into(self, target: memoryview) -> None:
        """Write the elements in C order, little endian, into `target`."""
        array = self._array
        if target.nbytes == self.byte_count >= MIN_STREAMED_BYTES and self._is_packed():
            stream_memory(target, find_address(array))
        elif self.byte_count > _MAX_SMALL_BYTES:
            np.copyto(np.frombuffer(target, self._little).reshape(self.shape), array)
        else:
            # A second copy of data in the cache costs less than creating an array on top of
            # `target`.
            target[:] = self.copy_elements()

    def accelerator(self) -> DeviceCopier | None:
        """Return None: an array lies in host memory."""
        return None

    def elements(self) -> memoryview | None:
        """Return the elements in place; None if they are not packed."""
        return self._array.reshape(-1).view(np.uint8).data if self._is_packed() else None

    def _is_packed(self) -> bool:
        return self._array.flags.c_contiguous and self._array.dtype == self._little

    def unordered(self) -> memoryview | None:
        """Return the elements in place, in C or Fortran order; None for any other order."""
        flags = self._array.flags
        if self._array.dtype != self._little or not (flags.c_contiguous or flags.f_contiguous):
            return None
        return self._array.ravel(order="K").view(np.uint8).data

    def get_version(self) -> TensorVersion | None:
        """Return None: an array keeps no record of changes."""
        return None

    def copy_elements(self) -> bytes:
        """Return a copy of the elements in C order, little endian."""
        array = self._array
        if array.dtype is not self._little:
            array = array.astype(self._little, copy=False)
        return array.tobytes()

    def locate_elements(self) -> int | bytes:
        """Return the address of the elements, or a copy if they are not packed."""
        return find_address(self._array) if self._is_packed() else self.copy_elements()

    def make_head_source(self, count: int) -> ArraySource:
        """Return a copy of the first elements in C order, as an array of one dimension."""
        return ArraySource(cast("npt.NDArray[Any]", self._array.flat[:count]), self.dtype)

    def is_finite(self) -> bool:
        """Return whether no element is NaN or infinite."""
        if not self._type.is_widened:
            integers = self._array.dtype.kind in "biu"
            return integers or bool(np.isfinite(self._array).all())
        data = memoryview(bytearray(self.byte_count))
        self.copy_into(data)
        wide = np.frombuffer(convert_to_stored(self.dtype, data), self._type.descr)
        return bool(np.isfinite(wide).all())

    def has_changed(self) -> bool:
        """Return False: an array keeps no record of changes."""
        return False

    def make_memory_source(self) -> ArraySource:
        """Return the source itself: it is only a view of memory."""
        return self

    def read_again(self) -> ArraySource | str:
        """Return the source itself: an array keeps its memory while it is viewed."""
        return self

    def start_statistics(
        self, items: tuple[str, ...], precision: StatisticPrecision
    ) -> DeferredStatistics | None:
        """Return None: an array lies in host memory."""
        return None


# The cache is bounded because extension packages may define any number of types, although a job
# uses few.
@lru_cache(maxsize=256)
def _find_types(kind: np.dtype[Any], name: str) -> tuple[ElementType, np.dtype[np.generic]]:
    """Return an array's element type, and its dtype in a file."""
    if kind.hasobject:
        raise UnsupportedError(f"an array of Python objects ({kind}) cannot be stored")
    # Types of extension packages, such as bfloat16, have the common name as their own name.
    little = cast("np.dtype[np.generic]", kind.newbyteorder("<"))
    # If no bytes need to be swapped, the same dtype object is returned, so that callers can compare
    # by identity.
    return get_element_type(name or f"{kind.name}"), kind if kind == little else little


_logger = logging.getLogger(__name__)

UNSUPPORTED_DTYPE = "unsupported_dtype"
UNREADABLE_ARRAY = "unreadable_array"
SIDES = {side.value: side for side in TensorSide}
"""Sides by the words that scripts use; this look-up takes a tenth of the time of a call of
`TensorSide`.
"""
_SIDE_NAMES = tuple(SIDES)
_ALLOWED_NUMBERS = range(1 << 32)
"""Allowed numbers of slots and of graphs."""


def check_array_place(side: object, slot: object, graph: object) -> str:
    """Return what is wrong with the place of an array; empty if nothing is."""
    if side in _SIDE_NAMES and slot in _ALLOWED_NUMBERS and graph in _ALLOWED_NUMBERS:
        return ""
    allowed = f"{' or '.join(_SIDE_NAMES)}, and whole numbers from 0 to {_ALLOWED_NUMBERS[-1]}"
    return f"side {side!r}, slot {slot!r}, graph {graph!r} is not allowed; allowed: {allowed}"


def make_graph_nodes(names: Sequence[str], op_types: Sequence[str] | None) -> list[GraphNode] | str:
    """Return the nodes of a compiled graph, or a text that says what is wrong with the arguments.

    Without `op_types` the types are taken from the names.
    """
    kinds = [extract_op_type(name) for name in names] if op_types is None else op_types
    if len(kinds) != len(names):
        return f"{len(kinds)} op_types for {len(names)} names; allowed: one for each name"
    return [GraphNode(name, kind) for name, kind in zip(names, kinds, strict=True)]


@dataclass(slots=True)
class _ArrayNodeDraft:
    """Draft of a graph node: the arrays of an operator that were passed so far."""

    source: tuple[SourceLine, ...]
    inputs: set[int] = field(default_factory=set[int])
    outputs: dict[int, TensorType] = field(default_factory=dict[int, TensorType])

    def add_array(self, side: TensorSide, slot: int, source: TensorSource) -> None:
        """Add an array of the operator."""
        if side is TensorSide.INPUT:
            self.inputs.add(slot)
        else:
            self.outputs[slot] = TensorType(source.dtype, source.shape)

    def make_node(self, name: str, op_type: str) -> GraphNode:
        """Return the graph node of the operator; the producers of its inputs are unknown."""
        return GraphNode(
            name=name,
            op_type=op_type,
            inputs=("",) * len(self.inputs),
            outputs=tuple(kind for _, kind in sorted(self.outputs.items())),
            source=self.source,
        )


@dataclass(slots=True)
class _OpenArrayOperator:
    """An operator whose arrays are being passed."""

    graph: int
    op_type: str
    name: str
    is_weight: bool
    """Whether the item is a weight and not an operator that ran."""
    begun: StartedEvent
    node_draft: _ArrayNodeDraft | None
    """Draft of the operator's graph node; None unless operators are described."""


class ArrayOperatorRecorder:
    """Records the operators of one session; each thread has at most one open operator."""

    def __init__(
        self, recorder: Recorder, source_of: Callable[[Any], TensorSource | str | None]
    ) -> None:
        """`source_of` returns the source of an array, or the reason why it cannot be read.

        It returns None for an array that this rank has no part of.
        """
        self._recorder = recorder
        self._source_of = source_of
        self._operators: dict[int, _OpenArrayOperator] = {}
        self._constants: dict[tuple[int, str], TensorObservation] = {}

    def record_array(
        self, op_type: str, op_name: str, side: TensorSide, slot: int, array: Any, graph: int
    ) -> None:
        """Record one array; an array that no file can hold is counted as lost."""
        operator = self._open_operator(graph, op_type, op_name)
        place = (graph, op_type, op_name, side, slot)
        wanted = self._recorder.is_wanted(graph, op_name, side)
        source = self._make_source(place, array, wanted=wanted)
        if source is None:
            return
        if operator.node_draft is not None:
            operator.node_draft.add_array(side, slot, source)
        if wanted:
            state = operator.is_weight
            forward = UNDIVIDED_PASS if state else self._recorder.declared_pass
            # This equals `TensorObservation(...)` in a third of the time.
            fields = (*place, "", source, state, False, forward)
            self._recorder.observe(tuple.__new__(TensorObservation, fields))

    def record_constant(self, name: str, array: Any, graph: int) -> None:
        """Record a constant in the next armed iteration, which may be the running one."""
        place = (graph, PARAMETER_TYPE, name, TensorSide.OUTPUT, 0)
        wanted = self._recorder.is_wanted(graph, name, TensorSide.OUTPUT)
        source = self._make_source(place, array, wanted=wanted)
        if source is not None:
            found = TensorObservation(*place, "constant", source, state=True, constant=True)
            self._constants[graph, name] = found
            self.record_waiting_constants()

    def record_waiting_constants(self) -> None:
        """Record the constants that waited for an armed iteration."""
        if self._recorder.armed:
            waiting, self._constants = self._constants, {}
            for constant in waiting.values():
                if self._recorder.is_wanted(constant.graph, constant.op_name, constant.side):
                    self._recorder.observe(constant)

    def end_operators(self, *, raised: bool = False) -> None:
        """End the open operators of all threads; `raised` applies to the operator of the calling
        thread.
        """
        for thread in list(self._operators):
            self._finish_operator(thread, raised=raised and thread == threading.get_ident())

    def _open_operator(self, graph: int, op_type: str, name: str) -> _OpenArrayOperator:
        thread = threading.get_ident()
        current = self._operators.get(thread)
        if current is None or current.name != name or current.graph != graph:
            self._finish_operator(thread)
            recorder, draft = self._recorder, None
            if recorder.is_describing:
                draft = _ArrayNodeDraft(capture_source_lines())
            is_weight = op_type == PARAMETER_TYPE and not is_gradient(name)
            if not is_weight:
                recorder.begin_call(graph, name)
            begun = recorder.start_event(graph=graph, name=name)
            current = _OpenArrayOperator(graph, op_type, name, is_weight, begun, draft)
            self._operators[thread] = current
        return current

    def _finish_operator(self, thread: int, *, raised: bool = False) -> None:
        operator = self._operators.pop(thread, None)
        if operator is None:
            return
        self._recorder.finish_event(operator.begun)
        draft = operator.node_draft
        if draft is not None:
            node = draft.make_node(operator.name, operator.op_type)
            self._recorder.describe(operator.graph, node)
        self._recorder.end_call(operator.graph, operator.name, raised=raised)

    def _make_source(
        self, place: tuple[int, str, str, TensorSide, int], array: Any, *, wanted: bool
    ) -> TensorSource | None:
        """Return the source of an array, if this rank has a readable part of it.

        An array that cannot be read is counted as lost if it is wanted.
        """
        try:
            source = self._source_of(array)
            if not isinstance(source, str):
                return source
            reason = source
        except (UnsupportedError, TypeError, ValueError) as error:
            _logger.debug("an array of operator %s cannot be stored: %s", place[2], error)
            reason = UNSUPPORTED_DTYPE
        except Exception as error:  # `source_of` may run code of the script's object
            self._recorder.warn_once(f"numpy cannot view an array: {error}")
            reason = UNREADABLE_ARRAY
        if wanted:
            self._recorder.count_loss(*place, reason)
        return None
