"""Figures in the place of elements: in host memory at once, on an accelerator at the end.

What an accelerator computes is read back once for many tensors. Never sends anything.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rankdump.contract.exchange import RecordHead
from rankdump.contract.plan import Precision
from rankdump.contract.statistics import figures
from rankdump.values import Deferred, Staged, TensorSource

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Measured:
    """A record whose figures are still on an accelerator."""

    head: RecordHead
    figures: Deferred


def without_elements(head: RecordHead, texts: tuple[str, ...]) -> Staged:
    """Return the record that carries figures and no elements."""
    return Staged(replace(head, figures=texts), memoryview(b""))


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
        data = memoryview(bytearray(source.byte_count))
        source.copy_into(data)
        return without_elements(head, figures(self._items, source.dtype, data))


@dataclass(frozen=True, slots=True)
class Unread:
    """A record whose figures could not be read back."""

    head: RecordHead


class Batch:
    """Records that wait for the end of an iteration, in their order; safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Staged | Measured] = []

    def add(self, record: Staged | Measured) -> None:
        """Put a record at the end."""
        with self._lock:
            self._waiting.append(record)

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
