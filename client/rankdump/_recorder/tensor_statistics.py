"""Statistics of tensors, computed on the tensor's device; their fingerprints if the plan asks for
them; and the rows that wait until both are known.

Results on an accelerator are read back once for many tensors, and the rows of small tensors in host
memory are formatted together. This module never sends anything.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, compress, islice
from typing import Any, NamedTuple, TypeAlias, cast
from weakref import ReferenceType, ref

import numpy as np

from rankdump._core.bounded_cache import remember
from rankdump._core.element_types import ELEMENT_TYPES, get_element_type
from rankdump._core.plan import StatisticPrecision
from rankdump._core.record import MAX_FRAME_ROWS, StatisticRows, TensorKind
from rankdump._core.recorder_protocol import DeferredStatistics, TensorSource, TensorVersion
from rankdump._core.statistics import (
    MD5_ITEM,
    compute_statistic_row,
    has_statistics,
    make_statistics_form,
    write_statistic_rows,
)
from rankdump._core.tensor_fingerprint import (
    FingerprintPlacement,
    MeasuredTensor,
    measure_with_fingerprint,
    place_fingerprint,
)
from rankdump._core.tensor_layout import TensorLayout
from rankdump._kernels.element_moments import ELEMENT_CODES
from rankdump._kernels.kernel_functions import KERNELS
from rankdump._recorder.iteration_state import LostTensor

STATISTICS_FAILED = "figures_failed"
MAX_WAITING_ROWS = 2048
"""Maximum number of waiting rows, for a training loop that never calls `step`."""
MAX_WAITING_BYTES = 1 << 23
SMALL_TENSOR_BYTES = 1 << 14
"""Up to this size a tensor is measured at once, and its row is formatted together with others."""

_MAX_CACHED_TENSORS = 1024
_SAMPLE_WORDS = 64
"""Number of eight-byte words in the sample that a cached tensor is compared by."""
_MemoryRange = tuple[int, str, int, int, FingerprintPlacement | None]
"""Key of the cache: identity of an object, element type, address in memory or 0 for a copy, number
of bytes, and how the fingerprint is computed.
"""

_pack_moments = KERNELS.functions.pack_moments
_KERNEL_TYPES = {
    name: (code, get_element_type(name).item_bytes) for name, code in ELEMENT_CODES.items()
}
"""Kernel code and item bytes of each element type that kernels read."""

_logger = logging.getLogger(__name__)

StatisticsResult: TypeAlias = "str | MeasuredTensor | bytes | DeferredStatistics"
"""Statistics of a tensor in the form that was taken: texts joined by commas; these texts with a
fingerprint; packed moments of a small tensor; its elements, if they are needed in order; or
statistics that are still being computed.
"""
_ReadResult: TypeAlias = "str | MeasuredTensor"


class TensorStatisticsRow(NamedTuple):
    """Row of a tensor whose statistics alone are kept."""

    kind: TensorKind
    timestamp_us: int
    statistics: StatisticsResult
    iteration: int
    switched_on: bool = False
    degraded: str = ""
    """Reason why the elements are not kept; empty if the plan asks for statistics only."""


class StatisticsCache:
    """Statistics of recently measured tensors; safe to use from several threads.

    An operator often reads what the operator before it wrote, perhaps in another shape. A tensor is
    not measured again if it has the same memory of the same object, the same version, and the same
    sample of elements. The sample detects writes that bypass the framework and so change no
    version, except writes to a few elements.
    """

    def __init__(self) -> None:
        self._known: dict[_MemoryRange, tuple[ReferenceType[object], int, bytes, _ReadResult]] = {}

    def get_result(
        self,
        version: TensorVersion | None,
        dtype: str,
        data: memoryview,
        measured: Callable[[], _ReadResult],
        *,
        lent: bool,
        placement: FingerprintPlacement | None = None,
    ) -> _ReadResult:
        """Return the cached statistics of a tensor, or those of `measured`, which are cached then.

        `lent` says that `data` is the tensor's own memory and not a copy in another order.
        """
        if version is None:
            return measured()
        words = np.frombuffer(data[: data.nbytes & ~7], np.uint64)
        thing = version.owner if lent else version.tensor_object
        place = id(thing), dtype, words.ctypes.data if lent else 0, data.nbytes, placement
        sample = words[:: max(1, words.size // _SAMPLE_WORDS)].tobytes()
        known = self._known.get(place)
        if (
            known is not None
            and known[1:3] == (version.change_count, sample)
            and known[0]() is thing
        ):
            return known[3]
        result = measured()
        entry = ref(thing), version.change_count, sample, result
        remember(self._known, place, entry, _MAX_CACHED_TENSORS)
        return result


class StatisticsCalculator:
    """Computes the statistics that the plan selects on the tensor's device."""

    def __init__(
        self,
        *,
        items: tuple[str, ...],
        on_device: bool,
        precision: StatisticPrecision,
        exact: bool = False,
        fingerprints: bool = False,
    ) -> None:
        """`exact` writes numbers with all digits."""
        self._items = items
        self._on_device = on_device
        self._precision: StatisticPrecision = precision
        self._exact = exact
        self._fingerprints = fingerprints
        self._ordered = MD5_ITEM in items or fingerprints
        self._form = make_statistics_form(items, exact=exact)
        self._recent = StatisticsCache()
        self.measured_types = frozenset(
            name for name in ELEMENT_TYPES if not items or has_statistics(name)
        )
        """Element types whose tensors have the statistics that the plan selects."""

    def measure_tensor(
        self, source: TensorSource, layout: TensorLayout | None = None
    ) -> StatisticsResult:
        """Return the statistics of a tensor as it is now, or the data to compute them from later.

        If the tensor is a part of a logical tensor, `layout` says which part the fingerprint is
        for.
        """
        if not self._items and not self._fingerprints:
            return ""
        if self._on_device and self._items:
            promised = source.start_statistics(self._items, self._precision)
            if promised is not None:
                return promised
        size = source.byte_count
        if 0 < size <= SMALL_TENSOR_BYTES:
            if self._ordered:
                return source.copy_elements()
            known = _KERNEL_TYPES.get(source.dtype)
            if known is not None:
                code, width = known
                place, parts = source.locate_elements(), self._form.parts
                return _pack_moments(place, size // width, code, parts)
        data = source.elements() if self._ordered else source.unordered()
        lent = data is not None
        if data is None:
            data = memoryview(bytearray(size))
            source.copy_into(data)
        elements, dtype = data, source.dtype
        placement = self._place(dtype, tuple(source.shape), layout)

        def measured() -> _ReadResult:
            return self._measure(dtype, elements, placement)

        return self._recent.get_result(
            source.get_version(), dtype, elements, measured, lent=lent, placement=placement
        )

    def _place(
        self, dtype: str, shape: tuple[int, ...], layout: TensorLayout | None
    ) -> FingerprintPlacement | None:
        return place_fingerprint(dtype, shape, layout) if self._fingerprints else None

    def _measure(
        self, dtype: str, data: bytes | memoryview, placement: FingerprintPlacement | None
    ) -> _ReadResult:
        if not self._fingerprints:
            return compute_statistic_row(self._items, dtype, data, exact=self._exact)
        return measure_with_fingerprint(self._items, dtype, data, placement, exact=self._exact)

    def read_results(
        self, kinds: Sequence[TensorKind], taken: Sequence[StatisticsResult]
    ) -> list[_ReadResult | None]:
        """Return the statistics of all taken results, each sort read back at once; None for a
        result that failed.
        """
        found = [each if isinstance(each, (str, MeasuredTensor)) else None for each in taken]
        if not self._ordered:
            # If tensors are small and in host memory, nearly all results are packed moments.
            places = [at for at, each in enumerate(taken) if type(each) is bytes]
            packed = cast("list[bytes]", [taken[at] for at in places])
            for at, row in zip(places, write_statistic_rows(self._form, packed), strict=True):
                found[at] = row
        sorts: dict[str | type[DeferredStatistics], list[int]] = {}
        for at in (at for at, read in enumerate(found) if read is None):
            each = cast("bytes | DeferredStatistics", taken[at])
            sort = kinds[at].dtype if isinstance(each, bytes) else type(each)
            sorts.setdefault(sort, []).append(at)
        for sort, places in sorts.items():
            some = [taken[at] for at in places]
            try:
                if isinstance(sort, str):
                    data = cast("list[bytes]", some)
                    rows = self._measure_small(sort, [kinds[at] for at in places], data)
                else:
                    promised = cast("list[DeferredStatistics]", some)
                    rows = [",".join(row) for row in promised[0].read(promised)]
                for at, row in zip(places, rows, strict=True):
                    found[at] = row
            except Exception:  # a device that failed must not end the training
                _logger.debug("statistics could not be read back", exc_info=True)
        return found

    def _measure_small(
        self, dtype: str, kinds: Sequence[TensorKind], elements: Sequence[bytes]
    ) -> Sequence[_ReadResult]:
        """Measure small tensors with equal elements only once: an operator often reads what the
        operator before it wrote.
        """
        places = [
            (data, self._place(dtype, kind.shape, kind.layout))
            for kind, data in zip(kinds, elements, strict=True)
        ]
        found = {each: self._measure(dtype, *each) for each in dict.fromkeys(places)}
        return [found[each] for each in places]


class _RowRun(NamedTuple):
    """Consecutive rows that may share a frame, if there are not too many of them."""

    mark: tuple[Any, ...]
    """Values that all rows of a frame share: iteration, switched on, degraded."""
    fields: list[Any]
    """Kind, time and statistics of each row in turn, in one flat list, so that no object is kept
    for a row.
    """


class RowBatch:
    """Rows that wait for the end of an iteration, in order; safe for several threads."""

    def __init__(self, limit: int = MAX_WAITING_ROWS) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._runs: list[_RowRun] = []
        self._rows = self._bytes = 0

    def add(self, row: TensorStatisticsRow) -> bool:
        """Append a row; return whether enough rows wait to be read now."""
        fields, mark = row[:3], row[3:]
        with self._lock:
            runs = self._runs
            if not runs or runs[-1].mark != mark:
                runs.append(_RowRun(mark, []))
            runs[-1].fields.extend(fields)
            self._rows += 1
            if type(fields[2]) is bytes:
                self._bytes += len(fields[2])
            return self._rows >= self._limit or self._bytes >= MAX_WAITING_BYTES

    def drain_rows(self, calculator: StatisticsCalculator) -> Iterator[StatisticRows | LostTensor]:
        """Remove all rows and yield them as frames; each sort of statistics is read
        back at once.
        """
        with self._lock:
            runs, self._runs = self._runs, []
            self._rows = self._bytes = 0
        if not runs:
            return
        kinds = list(chain.from_iterable(run.fields[::3] for run in runs))
        taken = list(chain.from_iterable(run.fields[2::3] for run in runs))
        results = iter(calculator.read_results(kinds, taken))
        for run in runs:
            yield from _make_row_frames(run, list(islice(results, len(run.fields) // 3)))


def _make_row_frames(
    run: _RowRun, results: Sequence[_ReadResult | None]
) -> Iterator[StatisticRows | LostTensor]:
    iteration, switched_on, degraded = run.mark
    kinds, stamps_us = run.fields[::3], run.fields[1::3]
    measured = [each for each in results if each is not None]
    if len(measured) < len(results):
        read = [each is not None for each in results]
        unread = [kind for kind, each in zip(kinds, results, strict=True) if each is None]
        yield from (LostTensor(iteration, kind.op_name, STATISTICS_FAILED) for kind in unread)
        kinds, stamps_us = list(compress(kinds, read)), list(compress(stamps_us, read))
    statistics = [each if isinstance(each, str) else each.statistics for each in measured]
    fingerprints = [b"" if isinstance(each, str) else each.fingerprint for each in measured]
    if not any(fingerprints):
        fingerprints = []
    for at in range(0, len(statistics), MAX_FRAME_ROWS):
        some = slice(at, at + MAX_FRAME_ROWS)
        columns = tuple(kinds[some]), tuple(stamps_us[some]), tuple(statistics[some])
        yield StatisticRows(iteration, *columns, switched_on, degraded, tuple(fingerprints[some]))
