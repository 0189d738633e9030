"""The texts that a stream has said: every name once, numbers from then on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from rankdump.wire.v1 import coordinator_pb2, events_pb2

MAX_TEXTS = 65_536
"""Beyond it the table starts anew, before the next message."""
_INDEX = "<u4"


class StreamTexts:
    """The table of one stream; the empty text stands at 0 from the start."""

    def __init__(self) -> None:
        self._indexes = {"": 0}
        self._said = 1

    def added(self) -> coordinator_pb2.Texts | None:
        """Return what the other side does not know yet; call it once a message."""
        texts = list(self._indexes)[self._said :] if self._said < len(self._indexes) else []
        first, self._said = self._said, len(self._indexes)
        return coordinator_pb2.Texts(first=first, texts=texts) if texts else None

    def renew(self) -> None:
        """Start anew if there are too many; what `added` returns next says so."""
        if len(self._indexes) > MAX_TEXTS:
            self._indexes, self._said = {"": 0}, 0

    def point(self, columns: events_pb2.EventColumns) -> None:
        """Let a batch with names of its own point into the table instead."""
        places = self._places(columns.names)
        calls = len(columns.calls) // 4
        for field, count in (("name", columns.count), ("group", calls), ("dtype", calls)):
            setattr(columns, field, _mapped(getattr(columns, field), count, places))
        columns.ClearField("names")

    def _places(self, names: Iterable[str]) -> npt.NDArray[Any]:
        indexes = self._indexes
        found = [indexes.setdefault(name, len(indexes)) for name in names]
        return np.array(found or [0], _INDEX)


def _mapped(data: bytes, count: int, places: npt.NDArray[Any]) -> bytes:
    # An empty column is one of zeros, both ways.
    indexes = np.frombuffer(data, _INDEX) if data else np.zeros(count, _INDEX)
    mapped = places[indexes]
    return mapped.tobytes() if mapped.any() else b""
