"""Metrics of the daemons: the table of every metric by Prometheus' naming conventions with its kind
and labels, and the counters of a process, which never fall while the process lives.
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from rankdump._core.events import FindingKind
from rankdump._core.record import DROP_REASONS
from rankdump._core.status import MetricSample, SessionState
from rankdump._core.timeouts import HintLevel

AGENT_PREFIX, COORDINATOR_PREFIX, PROCESS_PREFIX = (
    "rankdump_agent_",
    "rankdump_coordinator_",
    "rankdump_",
)
"""How the names begin of what an agent, a coordinator and every process counts."""
MAX_LABELLED_SAMPLES = 64
"""Roots or jobs that have a sample of their own."""
DURATION_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Upper bounds of the buckets of durations."""
PAGE_REFUSAL_REASONS = ("busy", "certificate", "malformed", "method", "path", "role")
"""Why the page is refused: no place, no certificate that is believed, no request, another method
than GET, another path, a certificate that may not read or is revoked.
"""

SampleKey = tuple[str, tuple[tuple[str, str], ...]]
"""Name and labels of a sample; labels in the order of their names."""


class MetricKind(str, Enum):
    """How a metric behaves."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


class MetricAggregation(str, Enum):
    """What stands for samples of several processes."""

    SUM = "sum"
    LEAST = "least"
    MOST = "most"


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """One row of the table."""

    kind: MetricKind
    help_text: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """The values of each label where they are known beforehand; else none."""
    aggregation: MetricAggregation = MetricAggregation.SUM


def _counter(text: str, **labels: Iterable[str]) -> MetricDefinition:
    return MetricDefinition(
        MetricKind.COUNTER, text, {name: tuple(values) for name, values in labels.items()}
    )


def _gauge(
    text: str, joined: MetricAggregation = MetricAggregation.SUM, **labels: Iterable[str]
) -> MetricDefinition:
    given = {name: tuple(values) for name, values in labels.items()}
    return MetricDefinition(MetricKind.GAUGE, text, given, joined)


_AGENT_METRICS = {
    "records_total": _counter(
        "Tensors that were settled, by what became of them.",
        fate=("stored", "linked", "degraded", "dropped"),
    ),
    "dropped_records_total": _counter(
        "Selected tensors that are not in the tree, by reason and by who gave them up.",
        by=("agent", "rank"),
        reason=sorted(DROP_REASONS),
    ),
    "received_bytes_total": _counter("Bytes of tensors that arrived."),
    "stored_bytes_total": _counter("Bytes of files that were written for them."),
    "iterations_total": _counter("Iterations of ranks that ended."),
    "stall_seconds_total": _counter("Time that training threads were held up by dumping."),
    "opened_sessions_total": _counter("Sessions that were opened, again or for the first time."),
    "commit_seconds": MetricDefinition(
        MetricKind.HISTOGRAM, "How long a transaction of the ledger took."
    ),
    "commit_errors_total": _counter("Transactions of the ledger that failed."),
    "queue_records": _gauge("Frames on their way through the agent."),
    "queue_bytes": _gauge("What they occupy."),
    "queue_limit_bytes": _gauge("What they may occupy; then ranks wait."),
    "memory_bytes": _gauge("Memory that is taken or set aside.", part=("queue", "slabs")),
    "memory_limit_bytes": _gauge("What queue, slabs and sessions may take together."),
    "sessions": _gauge(
        "Sessions that are remembered.", state=[each.value for each in SessionState]
    ),
    "disk_free_bytes": _gauge("Room on the disk of a tree.", MetricAggregation.LEAST, root=()),
    "disk_size_bytes": _gauge("Size of that disk.", MetricAggregation.MOST, root=()),
    "disk_floor_bytes": _gauge(
        "Tensors are refused rather than leave less than this.", MetricAggregation.MOST, root=()
    ),
    "ledger_bytes": _gauge("What the ledger takes."),
    "ledger_disk_free_bytes": _gauge("Room on its disk; ranks wait at 0.", MetricAggregation.LEAST),
    "job_bytes": _gauge("What the dump of a job takes here.", job=()),
    "retired_iterations_total": _counter(
        "Iterations of ranks that were removed because of their age, or for room."
    ),
    "report_waiting_events": _gauge("Events that wait to be told to the coordinator."),
    "report_lost_events_total": _counter("Events that never reached the coordinator."),
    "worker_restarts_total": _counter("Workers that were started again."),
}
_COORDINATOR_METRICS = {
    "reports_total": _counter("Reports that were taken."),
    "published_iterations_total": _counter("Iterations whose order was written."),
    "published_events_total": _counter("Lines of these orders."),
    "lost_iterations_total": _counter("Iterations whose order could not be written."),
    "agents": _gauge("Agents that reported.", state=("connected", "silent")),
    "agent_lost_events": _gauge("Events that agents gave up before they came here."),
    "jobs": _gauge("Jobs that are remembered."),
    "pending_iterations": _gauge("Iterations that are not published yet."),
    "pending_events": _gauge("Their events."),
    "merge_lag_seconds": _gauge(
        "Age of the oldest event that is not published.", MetricAggregation.MOST
    ),
    "findings": _gauge(
        "What is odd about orders that are remembered.", kind=[each.value for each in FindingKind]
    ),
    "timeout_hints": _gauge(
        "Process groups by how near they came to their timeout.",
        level=[each.value for each in HintLevel],
    ),
    "timeout_used_ratio": _gauge(
        "Largest part of a timeout that was used.", MetricAggregation.MOST
    ),
}
_PROCESS_METRICS = {
    "refused_calls_total": _counter("Calls that ended with an error, by its code.", code=()),
    "refused_page_requests_total": _counter(
        "Requests of the page of metrics that were refused.", reason=PAGE_REFUSAL_REASONS
    ),
    "build_info": MetricDefinition(
        MetricKind.INFO, "What runs.", {"version": ()}, MetricAggregation.MOST
    ),
    "start_time_seconds": _gauge(
        "When the process began, since the epoch.", MetricAggregation.LEAST
    ),
    "tls_not_after_timestamp_seconds": _gauge(
        "End of the time of the certificate that is shown, since the epoch.",
        MetricAggregation.LEAST,
    ),
}
METRIC_DEFINITIONS: Mapping[str, MetricDefinition] = {
    prefix + name: metric
    for prefix, table in (
        (AGENT_PREFIX, _AGENT_METRICS),
        (COORDINATOR_PREFIX, _COORDINATOR_METRICS),
        (PROCESS_PREFIX, _PROCESS_METRICS),
    )
    for name, metric in table.items()
}
"""By name, as dashboards and alerts write it."""

_HISTOGRAM_SUFFIXES = ("_bucket", "_count", "_sum")


def find_metric_name(name: str) -> str:
    """Return the metric that a sample belongs to: a histogram has several samples.

    >>> metric_of("rankdump_agent_commit_seconds_bucket")
    'rankdump_agent_commit_seconds'
    """
    if name in METRIC_DEFINITIONS:
        return name
    for part in _HISTOGRAM_SUFFIXES:
        whole = name.removesuffix(part)
        if whole in METRIC_DEFINITIONS and METRIC_DEFINITIONS[whole].kind is MetricKind.HISTOGRAM:
            return whole
    return name


def is_cumulative(name: str) -> bool:
    """Return whether samples of that name never fall while a process lives."""
    metric = METRIC_DEFINITIONS.get(find_metric_name(name))
    return metric is not None and metric.kind in (MetricKind.COUNTER, MetricKind.HISTOGRAM)


def build_sample_key(sample: MetricSample) -> SampleKey:
    """Return what tells a sample from others."""
    return sample.name, tuple(sorted(sample.labels.items()))


def aggregate_samples(samples: Iterable[MetricSample]) -> list[MetricSample]:
    """Return one sample for all that have the same name and labels; unknown names are left out."""
    found: dict[SampleKey, float] = {}
    for sample in samples:
        metric = METRIC_DEFINITIONS.get(find_metric_name(sample.name))
        if metric is None:
            continue
        key = build_sample_key(sample)
        if key not in found:
            found[key] = sample.value
        elif metric.aggregation is MetricAggregation.SUM:
            found[key] += sample.value
        else:
            choose = min if metric.aggregation is MetricAggregation.LEAST else max
            found[key] = choose(found[key], sample.value)
    return [MetricSample(name, value, dict(labels)) for (name, labels), value in found.items()]


class MetricCounters:
    """Counters by name and labels; safe to use from several threads.

    What is counted often is counted in batches: `add_all` takes the lock once.
    """

    def __init__(self, prefix: str = "") -> None:
        """Show counters of that prefix as 0 before anything is counted."""
        self._lock = threading.Lock()
        self._sums: dict[SampleKey, float] = {}
        self._durations: dict[str, list[int]] = {}
        self._seconds: dict[str, float] = {}
        if prefix:
            self.start_at_zero(prefix)

    def start_at_zero(self, prefix: str) -> None:
        """Show counters whose name begins so as 0, with each value of their labels."""
        for name, metric in METRIC_DEFINITIONS.items():
            if name.startswith(prefix):
                self._begin(name, metric)

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Count so much more."""
        self.add_all({(name, tuple(sorted(labels.items()))): amount})

    def add_all(self, amounts: Mapping[SampleKey, float]) -> None:
        """Count so much more of each."""
        with self._lock:
            for key, amount in amounts.items():
                self._sums[key] = self._sums.get(key, 0.0) + amount

    def add_duration(self, name: str, seconds: float) -> None:
        """Count something that took so long."""
        with self._lock:
            buckets = self._durations.setdefault(name, [0] * (len(DURATION_BUCKETS_S) + 1))
            buckets[bisect_left(DURATION_BUCKETS_S, seconds)] += 1
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def samples(self) -> list[MetricSample]:
        """Return what was counted so far."""
        with self._lock:
            found = [
                MetricSample(name, value, dict(labels))
                for (name, labels), value in self._sums.items()
            ]
            for name, buckets in self._durations.items():
                found += _build_histogram(name, buckets, self._seconds[name])
            return found

    def _begin(self, name: str, metric: MetricDefinition) -> None:
        with self._lock:
            if metric.kind is MetricKind.HISTOGRAM:
                self._durations.setdefault(name, [0] * (len(DURATION_BUCKETS_S) + 1))
                self._seconds.setdefault(name, 0.0)
            elif metric.kind is MetricKind.COUNTER:
                labels = sorted(metric.labels)
                for values in itertools.product(*(metric.labels[label] for label in labels)):
                    key = name, tuple(zip(labels, values, strict=True))
                    self._sums.setdefault(key, 0.0)


def _build_histogram(name: str, buckets: list[int], seconds: float) -> Iterator[MetricSample]:
    """Yield the samples of a histogram: each bucket holds those before it as well."""
    bounds = [*(f"{bound}" for bound in DURATION_BUCKETS_S), "+Inf"]
    for bound, count in zip(bounds, itertools.accumulate(buckets), strict=True):
        yield MetricSample(f"{name}_bucket", count, {"le": bound})
    yield MetricSample(f"{name}_count", sum(buckets))
    yield MetricSample(f"{name}_sum", seconds)
