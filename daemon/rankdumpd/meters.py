"""What a process counts where it happens; never falls while the process lives."""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping

from rankdump.contract.room import MetricSample
from rankdumpd.metric_names import METRICS, SECONDS, Key, Kind, Metric


class Meters:
    """Counters by name and labels; safe to use from several threads.

    What is counted often is counted in batches: `add_all` takes the lock once.
    """

    def __init__(self, prefix: str = "") -> None:
        """Show counters of that prefix as 0 before anything is counted."""
        self._lock = threading.Lock()
        self._sums: dict[Key, float] = {}
        self._durations: dict[str, list[int]] = {}
        self._seconds: dict[str, float] = {}
        if prefix:
            self.begin(prefix)

    def begin(self, prefix: str) -> None:
        """Show counters whose name begins so as 0, with each value of their labels."""
        for name, metric in METRICS.items():
            if name.startswith(prefix):
                self._begin(name, metric)

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Count so much more."""
        self.add_all({(name, tuple(sorted(labels.items()))): amount})

    def add_all(self, amounts: Mapping[Key, float]) -> None:
        """Count so much more of each."""
        with self._lock:
            for key, amount in amounts.items():
                self._sums[key] = self._sums.get(key, 0.0) + amount

    def took(self, name: str, seconds: float) -> None:
        """Count something that took so long."""
        with self._lock:
            buckets = self._durations.setdefault(name, [0] * (len(SECONDS) + 1))
            buckets[bisect_left(SECONDS, seconds)] += 1
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def samples(self) -> list[MetricSample]:
        """Return what was counted so far."""
        with self._lock:
            found = [
                MetricSample(name, value, dict(labels))
                for (name, labels), value in self._sums.items()
            ]
            for name, buckets in self._durations.items():
                found += _histogram(name, buckets, self._seconds[name])
            return found

    def _begin(self, name: str, metric: Metric) -> None:
        with self._lock:
            if metric.kind is Kind.HISTOGRAM:
                self._durations.setdefault(name, [0] * (len(SECONDS) + 1))
                self._seconds.setdefault(name, 0.0)
            elif metric.kind is Kind.COUNTER:
                labels = sorted(metric.labels)
                for values in itertools.product(*(metric.labels[label] for label in labels)):
                    key = name, tuple(zip(labels, values, strict=True))
                    self._sums.setdefault(key, 0.0)


def _histogram(name: str, buckets: list[int], seconds: float) -> Iterator[MetricSample]:
    """Yield the samples of a histogram: each bucket holds those before it as well."""
    bounds = [*(f"{bound}" for bound in SECONDS), "+Inf"]
    for bound, count in zip(bounds, itertools.accumulate(buckets), strict=True):
        yield MetricSample(f"{name}_bucket", count, {"le": bound})
    yield MetricSample(f"{name}_count", sum(buckets))
    yield MetricSample(f"{name}_sum", seconds)
