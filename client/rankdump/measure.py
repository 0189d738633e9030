"""Figures in the place of elements, computed where the tensor lies.

What an accelerator computes is read back once for many tensors, and small tensors of the host
are copied first and measured together. Never sends anything.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from rankdump.contract.errors import ProtocolError
from rankdump.contract.exchange import RecordHead
from rankdump.contract.plan import Precision
from rankdump.contract.statistics import figures, figures_of_many
from rankdump.values import Deferred, Staged, TensorSource

MAX_WAITING = 2048
"""A loop without steps must not be waited for for ever."""
SMALL_BYTES = 1 << 14
"""Below this a copy, measured with many others, costs less than a measurement of its own."""
_NO_ELEMENTS = memoryview(b"")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Measured:
    """A record whose figures are still to be read."""

    head: RecordHead
    figures: Deferred


def without_elements(head: RecordHead, texts: tuple[str, ...]) -> Staged:
    """Return the record that carries figures and no elements."""
    return Staged(head.measured(texts), _NO_ELEMENTS)


@dataclass(frozen=True, slots=True, eq=False)
class Copied:
    """A small tensor of the host as it was, whose figures nobody has computed so far."""

    items: tuple[str, ...]
    dtype: str
    data: bytes

    def read(self, others: Sequence[Deferred]) -> list[tuple[str, ...]]:
        """Return the texts of these others, computed together for each element type."""
        kinds: dict[tuple[tuple[str, ...], str], list[Copied]] = {}
        for each in others:
            if not isinstance(each, Copied):
                raise ProtocolError(f"figures of {type(each).__name__} among those of copies")
            kinds.setdefault((each.items, each.dtype), []).append(each)
        texts: dict[int, tuple[str, ...]] = {}
        for (items, dtype), group in kinds.items():
            rows = figures_of_many(items, dtype, [each.data for each in group])
            texts.update((id(each), row) for each, row in zip(group, rows, strict=True))
        return [texts[id(each)] for each in others]


class Measure:
    """Computes the plan's figures where the tensor lies."""

    def __init__(self, *, items: tuple[str, ...], on_device: bool, precision: Precision) -> None:
        self._items = items
        self._on_device = on_device
        self._precision: Precision = precision

    def take(self, head: RecordHead, source: TensorSource) -> Staged | Measured:
        """Return the tensor's record with figures, or with the promise of them."""
        if self._on_device:
            promised = source.figures(self._items, self._precision)
            if promised is not None:
                return Measured(head, promised)
        data = source.elements()
        if data is None:
            data = memoryview(bytearray(source.byte_count))
            source.copy_into(data)
        if 0 < data.nbytes <= SMALL_BYTES:
            return Measured(head, Copied(self._items, source.dtype, bytes(data)))
        return without_elements(head, figures(self._items, source.dtype, data))


@dataclass(frozen=True, slots=True)
class Unread:
    """A record whose figures could not be read back."""

    head: RecordHead


class Batch:
    """Records that wait for the end of an iteration, in their order; safe for several threads."""

    def __init__(self, limit: int = MAX_WAITING) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._waiting: list[Staged | Measured] = []

    def add(self, record: Staged | Measured) -> bool:
        """Put a record at the end; return whether so many wait that they should be read now."""
        with self._lock:
            self._waiting.append(record)
            return len(self._waiting) >= self._limit

    def read(self) -> list[Staged | Unread]:
        """Take everything out, with the figures of each kind read back all at once."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        texts = _read_back([each.figures for each in waiting if isinstance(each, Measured)])
        return [_finished(each, texts) for each in waiting]


def _finished(record: Staged | Measured, texts: dict[int, tuple[str, ...]]) -> Staged | Unread:
    if isinstance(record, Staged):
        return record
    found = texts.get(id(record.figures))
    return Unread(record.head) if found is None else without_elements(record.head, found)


def _read_back(promised: Sequence[Deferred]) -> dict[int, tuple[str, ...]]:
    """Return the texts by the identity of the promise; those that cannot be had are missing."""
    kinds: dict[type[Deferred], list[Deferred]] = {}
    for each in promised:
        kinds.setdefault(type(each), []).append(each)
    found: dict[int, tuple[str, ...]] = {}
    for group in kinds.values():
        try:
            rows = group[0].read(group)
            found.update((id(each), row) for each, row in zip(group, rows, strict=True))
        except Exception:  # a device that failed must not end the training
            logger.debug("figures could not be read back", exc_info=True)
    return found
