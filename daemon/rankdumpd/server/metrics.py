"""Metrics of the daemons: the table of all metrics with their Prometheus names, types and labels,
and the counters of a process, which never decrease while the process lives.
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from rankdump._core.drop_reasons import DEGRADE_REASONS, DROP_REASONS
from rankdump._core.events import FindingKind
from rankdump._core.status import MetricSample, SessionState
from rankdump._core.timeouts import HintLevel
from rankdump._wire.channel import CODES_BY_ERROR, get_status_code
from rankdump.errors import RankdumpError

AGENT_PREFIX, COORDINATOR_PREFIX, PROCESS_PREFIX = (
    "rankdump_agent_",
    "rankdump_coordinator_",
    "rankdump_",
)
"""Prefixes of the metrics of an agent, of a coordinator and of every process."""
MAX_LABELLED_SAMPLES = 64
"""Largest number of roots or jobs with a sample of their own."""
DURATION_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Upper bounds of the buckets of duration histograms."""
PAGE_REFUSAL_REASONS = ("busy", "certificate", "malformed", "method", "path", "role")
"""Reasons for which the HTTP server refuses a request: too many connections (`busy`), no trusted
certificate, not HTTP (`malformed`), a method other than GET, an unknown path, a certificate that is
revoked or has no reading role (`role`).
"""

REFUSED_CALLS_METRIC = "rankdump_refused_calls_total"

SampleKey = tuple[str, tuple[tuple[str, str], ...]]
"""Name and labels of a sample; labels are sorted by name."""


class MetricKind(str, Enum):
    """Type of a metric in Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


class MetricAggregation(str, Enum):
    """How the samples of several processes are combined into one."""

    SUM = "sum"
    LEAST = "least"
    MOST = "most"


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """One metric: its kind, help text, labels and aggregation."""

    kind: MetricKind
    help_text: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """All values of each label, where they are known in advance; else empty."""
    aggregation: MetricAggregation = MetricAggregation.SUM


def _counter(text: str, **labels: Iterable[str]) -> MetricDefinition:
    return MetricDefinition(
        MetricKind.COUNTER, text, {name: tuple(values) for name, values in labels.items()}
    )


def _gauge(
    text: str, aggregation: MetricAggregation = MetricAggregation.SUM, **labels: Iterable[str]
) -> MetricDefinition:
    values = {name: tuple(each) for name, each in labels.items()}
    return MetricDefinition(MetricKind.GAUGE, text, values, aggregation)


_AGENT_METRICS = {
    "records_total": _counter(
        "Selected tensors whose processing has ended, by outcome (label fate).",
        fate=("stored", "linked", "same_as_baseline", "degraded", "dropped"),
    ),
    "dropped_records_total": _counter(
        "Selected tensors that were dropped, by reason and by who dropped them.",
        by=("agent", "rank"),
        reason=sorted(DROP_REASONS),
    ),
    "degraded_records_total": _counter(
        "Selected tensors of which less than the plan selects was kept, by reason.",
        reason=DEGRADE_REASONS,
    ),
    "baseline_records_total": _counter(
        "Tensors that were compared with the baseline of their plan, by what it says.",
        verdict=("same", "different", "absent", "unavailable"),
    ),
    "received_bytes_total": _counter("Bytes of tensors that the agent received."),
    "stored_bytes_total": _counter("Bytes of the files that the agent wrote for tensors."),
    "stored_unpacked_bytes_total": _counter(
        "Bytes of files that were stored unpacked because ranks waited or soon would, to be packed "
        "later, by reason.",
        reason=("queue_half_full", "rank_waits", "resent", "ring_half_full"),
    ),
    "packed_later_bytes_total": _counter(
        "Bytes that files took that were stored unpacked and have been packed since."
    ),
    "unpacked_files": _gauge("Files that were stored unpacked and are yet to be packed."),
    "unpacked_bytes": _gauge("Bytes of the files that are yet to be packed."),
    "table_rows_total": _counter("Rows that were written to the table of statistics."),
    "iterations_total": _counter("Iterations that ended, counted once for each rank."),
    "stall_seconds_total": _counter("Seconds that training threads waited for dumping."),
    "opened_sessions_total": _counter("Sessions that ranks opened or reopened."),
    "commit_seconds": MetricDefinition(
        MetricKind.HISTOGRAM, "Duration of transactions of the ledger."
    ),
    "commit_errors_total": _counter("Failed transactions of the ledger."),
    "queue_records": _gauge("Frames that the agent has received and not yet committed."),
    "queue_bytes": _gauge("Memory that received and uncommitted frames occupy."),
    "queue_limit_bytes": _gauge(
        "Limit of the memory for uncommitted frames; ranks wait when it is reached."
    ),
    "memory_bytes": _gauge(
        "Memory that is in use or reserved, by part.", part=("queue", "rings", "slabs")
    ),
    "memory_limit_bytes": _gauge(
        "Limit of the memory for queue, shared memory, sessions and rings of steps together."
    ),
    "sessions": _gauge(
        "Sessions that the agent knows, by state.", state=[each.value for each in SessionState]
    ),
    "waiting_ranks": _gauge(
        "Ranks whose sessions cannot be opened at present, and that try again."
    ),
    "disk_free_bytes": _gauge(
        "Free space on the disk of a dump tree.", MetricAggregation.LEAST, root=()
    ),
    "disk_size_bytes": _gauge("Size of the disk of a dump tree.", MetricAggregation.MOST, root=()),
    "disk_floor_bytes": _gauge(
        "Free space on the disk of a dump tree below which tensors are dropped.",
        MetricAggregation.MOST,
        root=(),
    ),
    "ledger_bytes": _gauge("Disk space that the ledger occupies."),
    "ledger_disk_free_bytes": _gauge(
        "Free space on the disk of the ledger; ranks wait when it is 0.", MetricAggregation.LEAST
    ),
    "job_bytes": _gauge("Disk space that the dump of a job occupies on this host.", job=()),
    "retired_iterations_total": _counter(
        "Iterations that retention removed for their age or for space, counted for each rank."
    ),
    "report_waiting_events": _gauge("Events that wait to be sent to the coordinator."),
    "report_lost_events_total": _counter(
        "Events that were lost before they reached the coordinator."
    ),
    "black_box_steps": _gauge("Steps of ranks in the rings of their black boxes."),
    "dropped_steps_total": _counter(
        "Oldest steps in the rings of black boxes that were dropped because memory was short."
    ),
    "dropped_step_tensors_total": _counter(
        "Oldest full tensors in the rings of black boxes that were dropped because memory was "
        "short, that came after their step, or that did not come to their end."
    ),
    "frozen_trees_total": _counter("Frozen trees that were written, one for each freeze of a job."),
    "worker_restarts_total": _counter("Restarts of worker processes."),
}
_COORDINATOR_METRICS = {
    "reports_total": _counter("Reports of agents that the coordinator accepted."),
    "published_iterations_total": _counter("Iterations whose execution order was published."),
    "published_events_total": _counter("Events in the published execution orders."),
    "lost_iterations_total": _counter("Iterations whose execution order could not be published."),
    "agents": _gauge(
        "Agents that are connected, and those that are not although sessions of theirs are open.",
        state=("connected", "silent"),
    ),
    "agent_lost_events": _gauge("Events that agents lost before they reached the coordinator."),
    "jobs": _gauge("Jobs that the coordinator knows."),
    "pending_iterations": _gauge("Iterations whose execution order is not published yet."),
    "pending_events": _gauge("Events of the iterations that are not published yet."),
    "merge_lag_seconds": _gauge(
        "Age of the oldest event that is not published yet.", MetricAggregation.MOST
    ),
    "findings": _gauge(
        "Findings about the execution orders that the coordinator knows, by kind.",
        kind=[each.value for each in FindingKind],
    ),
    "timeout_hints": _gauge(
        "Process groups, by how close they came to their timeout.",
        level=[each.value for each in HintLevel],
    ),
    "timeout_used_ratio": _gauge(
        "Largest share of a collective's timeout that was used.", MetricAggregation.MOST
    ),
}
_REFUSAL_CODES = sorted(
    {get_status_code(RankdumpError()).name, *(c.name for _, c in CODES_BY_ERROR)}
)
_PROCESS_METRICS = {
    "refused_calls_total": _counter(
        "gRPC calls that ended with an error, by status code.", code=_REFUSAL_CODES
    ),
    "refused_page_requests_total": _counter(
        "HTTP requests that the metrics page refused, by reason.", reason=PAGE_REFUSAL_REASONS
    ),
    "build_info": MetricDefinition(
        MetricKind.INFO, "Version of the running program.", {"version": ()}, MetricAggregation.MOST
    ),
    "start_time_seconds": _gauge(
        "Start time of the process, in seconds since the epoch.", MetricAggregation.LEAST
    ),
    "tls_not_after_timestamp_seconds": _gauge(
        "End of validity of the server certificate, in seconds since the epoch.",
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
"""All metrics by full name, as dashboards and alerts use it."""
LEDGER_COUNTERS = frozenset(
    {"rankdump_agent_report_lost_events_total", "rankdump_agent_retired_iterations_total"}
)
"""Counters that are stored in the ledger, so the next process of an agent continues them."""

_HISTOGRAM_SUFFIXES = ("_bucket", "_count", "_sum")


def find_metric_name(name: str) -> str:
    """Return the name of the metric that a sample belongs to; a histogram has several samples.

    >>> find_metric_name("rankdump_agent_commit_seconds_bucket")
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
    """Return whether samples with this name never decrease while a process lives."""
    metric = METRIC_DEFINITIONS.get(find_metric_name(name))
    return metric is not None and metric.kind in (MetricKind.COUNTER, MetricKind.HISTOGRAM)


def build_sample_key(sample: MetricSample) -> SampleKey:
    """Return the key that identifies a sample."""
    return sample.name, tuple(sorted(sample.labels.items()))


def aggregate_samples(samples: Iterable[MetricSample]) -> list[MetricSample]:
    """Return one sample for all samples with the same name and labels; unknown names
    are left out.
    """
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

    Frequent counts should be added in batches, because `add_all` takes the lock once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[SampleKey, float] = {}
        self._durations: dict[str, list[int]] = {}
        self._seconds: dict[str, float] = {}

    def start_at_zero(self, prefix: str) -> None:
        """Set all counters whose names begin with `prefix` to 0, for each known value of their
        labels.
        """
        for name, metric in METRIC_DEFINITIONS.items():
            if name.startswith(prefix):
                self._start_metric(name, metric)

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to one counter."""
        self.add_all({(name, tuple(sorted(labels.items()))): amount})

    def add_all(self, amounts: Mapping[SampleKey, float]) -> None:
        """Add to several counters."""
        with self._lock:
            for key, amount in amounts.items():
                self._sums[key] = self._sums.get(key, 0.0) + amount

    def add_duration(self, name: str, seconds: float) -> None:
        """Add a duration to a histogram."""
        with self._lock:
            buckets = self._durations.setdefault(name, [0] * (len(DURATION_BUCKETS_S) + 1))
            buckets[bisect_left(DURATION_BUCKETS_S, seconds)] += 1
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def samples(self) -> list[MetricSample]:
        """Return the samples of all counters and histograms."""
        with self._lock:
            found = [
                MetricSample(name, value, dict(labels))
                for (name, labels), value in self._sums.items()
            ]
            for name, buckets in self._durations.items():
                found += _build_histogram(name, buckets, self._seconds[name])
            return found

    def _start_metric(self, name: str, metric: MetricDefinition) -> None:
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
    """Yield the samples of a histogram; buckets are cumulative."""
    bounds = [*(f"{bound}" for bound in DURATION_BUCKETS_S), "+Inf"]
    for bound, count in zip(bounds, itertools.accumulate(buckets), strict=True):
        yield MetricSample(f"{name}_bucket", count, {"le": bound})
    yield MetricSample(f"{name}_count", sum(buckets))
    yield MetricSample(f"{name}_sum", seconds)
