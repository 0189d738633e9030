"""One row of figures, of whatever table. Pure values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rankdump.contract.key import TensorKey
from rankdump.contract.manifest import ManifestRecord
from rankdump.contract.statistics import ITEMS

NULL = "null"
"""What releases up to 2.2 write where no finite element is left."""
_NONFINITE_COUNTS = ("nan count", "negative inf count", "positive inf count")


@dataclass(frozen=True, slots=True)
class Figures:
    """One row."""

    key: TensorKey
    """As the table spells it; `op_name` below is the raw one where it is known."""
    dtype: str
    shape: tuple[int, ...]
    data_bytes: int
    values: Mapping[str, str]
    """Text of each figure by the title of its column."""
    relative: str
    """Path of the table below the root, with `/`."""
    record: ManifestRecord | None = None
    """What the manifest says; None for a row that no manifest names."""

    @property
    def op_type(self) -> str:
        """Type of the operator, raw where a manifest knows it."""
        return self.record.op_type if self.record else self.key.op_type

    @property
    def op_name(self) -> str:
        """Scope name of the operator, raw where a manifest knows it."""
        return self.record.op_name if self.record else self.key.op_name

    def number(self, item: str) -> float | None:
        """Return a figure by its name in `statistic_category`; None when the row has none."""
        text = self.values.get(ITEMS[item], NULL)
        try:
            return None if text == NULL else float(text)
        except ValueError:
            return None

    @property
    def finite(self) -> bool | None:
        """Whether every element is; None when the columns of the table cannot tell.

        The counts tell, and so do both extremes: a NaN makes them NaN.
        """
        counts = [self.number(item) for item in _NONFINITE_COUNTS]
        if None not in counts:
            return not any(counts)
        extremes = [self.number(item) for item in ("max", "min")]
        known = [number for number in extremes if number is not None]
        if not all(math.isfinite(number) for number in known):
            return False
        return True if len(known) == len(extremes) else None
