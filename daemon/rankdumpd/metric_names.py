"""Every metric there is: its name by Prometheus' conventions, its kind and its labels. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from rankdump.contract.findings import FindingKind
from rankdump.contract.reasons import REASONS
from rankdump.contract.room import MetricSample
from rankdump.contract.status import SessionState
from rankdump.contract.timeouts import HintLevel

AGENT, COORDINATOR, PROCESS = "rankdump_agent_", "rankdump_coordinator_", "rankdump_"
"""How the names begin of what an agent, a coordinator and every process counts."""
MOST_OPEN = 64
"""Roots or jobs that have a sample of their own."""
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Upper bounds of the buckets of durations."""
PAGE_REFUSALS = ("busy", "certificate", "malformed", "method", "path", "role")
"""Why the page is refused: no place, no certificate that is believed, no request, another method
than GET, another path, a certificate that may not read or is revoked.
"""

Key = tuple[str, tuple[tuple[str, str], ...]]
"""Name and labels of a sample; labels in the order of their names."""


class Kind(str, Enum):
    """How a metric behaves."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


class Joined(str, Enum):
    """What stands for samples of several processes."""

    SUM = "sum"
    LEAST = "least"
    MOST = "most"


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table."""

    kind: Kind
    text: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """The values of each label where they are known beforehand; else none."""
    joined: Joined = Joined.SUM


def _counter(text: str, **labels: Iterable[str]) -> Metric:
    return Metric(Kind.COUNTER, text, {name: tuple(values) for name, values in labels.items()})


def _gauge(text: str, joined: Joined = Joined.SUM, **labels: Iterable[str]) -> Metric:
    given = {name: tuple(values) for name, values in labels.items()}
    return Metric(Kind.GAUGE, text, given, joined)


_OF_AGENTS = {
    "records_total": _counter(
        "Tensors that were settled, by what became of them.",
        fate=("stored", "linked", "degraded", "dropped"),
    ),
    "dropped_records_total": _counter(
        "Selected tensors that are not in the tree, by reason and by who gave them up.",
        by=("agent", "rank"),
        reason=sorted(REASONS),
    ),
    "received_bytes_total": _counter("Bytes of tensors that arrived."),
    "stored_bytes_total": _counter("Bytes of files that were written for them."),
    "iterations_total": _counter("Iterations of ranks that ended."),
    "stall_seconds_total": _counter("Time that training threads were held up by dumping."),
    "opened_sessions_total": _counter("Sessions that were opened, again or for the first time."),
    "commit_seconds": Metric(Kind.HISTOGRAM, "How long a transaction of the ledger took."),
    "commit_errors_total": _counter("Transactions of the ledger that failed."),
    "queue_records": _gauge("Frames on their way through the agent."),
    "queue_bytes": _gauge("What they occupy."),
    "queue_limit_bytes": _gauge("What they may occupy; then ranks wait."),
    "memory_bytes": _gauge("Memory that is taken or set aside.", part=("queue", "slabs")),
    "memory_limit_bytes": _gauge("What queue, slabs and sessions may take together."),
    "sessions": _gauge(
        "Sessions that are remembered.", state=[each.value for each in SessionState]
    ),
    "disk_free_bytes": _gauge("Room on the disk of a tree.", Joined.LEAST, root=()),
    "disk_size_bytes": _gauge("Size of that disk.", Joined.MOST, root=()),
    "disk_floor_bytes": _gauge(
        "Tensors are refused rather than leave less than this.", Joined.MOST, root=()
    ),
    "ledger_bytes": _gauge("What the ledger takes."),
    "ledger_disk_free_bytes": _gauge("Room on its disk; ranks wait at 0.", Joined.LEAST),
    "job_bytes": _gauge("What the dump of a job takes here.", job=()),
    "retired_iterations_total": _counter(
        "Iterations of ranks that were removed because of their age, or for room."
    ),
    "report_waiting_events": _gauge("Events that wait to be told to the coordinator."),
    "report_lost_events_total": _counter("Events that never reached the coordinator."),
    "worker_restarts_total": _counter("Workers that were started again."),
}
_OF_COORDINATORS = {
    "reports_total": _counter("Reports that were taken."),
    "published_iterations_total": _counter("Iterations whose order was written."),
    "published_events_total": _counter("Lines of these orders."),
    "lost_iterations_total": _counter("Iterations whose order could not be written."),
    "agents": _gauge("Agents that reported.", state=("connected", "silent")),
    "agent_lost_events": _gauge("Events that agents gave up before they came here."),
    "jobs": _gauge("Jobs that are remembered."),
    "pending_iterations": _gauge("Iterations that are not published yet."),
    "pending_events": _gauge("Their events."),
    "merge_lag_seconds": _gauge("Age of the oldest event that is not published.", Joined.MOST),
    "findings": _gauge(
        "What is odd about orders that are remembered.", kind=[each.value for each in FindingKind]
    ),
    "timeout_hints": _gauge(
        "Process groups by how near they came to their timeout.",
        level=[each.value for each in HintLevel],
    ),
    "timeout_used_ratio": _gauge("Largest part of a timeout that was used.", Joined.MOST),
}
_OF_PROCESSES = {
    "refused_calls_total": _counter("Calls that ended with an error, by its code.", code=()),
    "refused_page_requests_total": _counter(
        "Requests of the page of metrics that were refused.", reason=PAGE_REFUSALS
    ),
    "build_info": Metric(Kind.INFO, "What runs.", {"version": ()}, Joined.MOST),
    "start_time_seconds": _gauge("When the process began, since the epoch.", Joined.LEAST),
    "tls_not_after_timestamp_seconds": _gauge(
        "End of the time of the certificate that is shown, since the epoch.", Joined.LEAST
    ),
}
METRICS: Mapping[str, Metric] = {
    prefix + name: metric
    for prefix, table in (
        (AGENT, _OF_AGENTS),
        (COORDINATOR, _OF_COORDINATORS),
        (PROCESS, _OF_PROCESSES),
    )
    for name, metric in table.items()
}
"""By name, as dashboards and alerts write it."""

_PARTS = ("_bucket", "_count", "_sum")


def metric_of(name: str) -> str:
    """Return the metric that a sample belongs to: a histogram has several samples.

    >>> metric_of("rankdump_agent_commit_seconds_bucket")
    'rankdump_agent_commit_seconds'
    """
    if name in METRICS:
        return name
    for part in _PARTS:
        whole = name.removesuffix(part)
        if whole in METRICS and METRICS[whole].kind is Kind.HISTOGRAM:
            return whole
    return name


def rises(name: str) -> bool:
    """Return whether samples of that name never fall while a process lives."""
    metric = METRICS.get(metric_of(name))
    return metric is not None and metric.kind in (Kind.COUNTER, Kind.HISTOGRAM)


def key_of(sample: MetricSample) -> Key:
    """Return what tells a sample from others."""
    return sample.name, tuple(sorted(sample.labels.items()))


def joined(samples: Iterable[MetricSample]) -> list[MetricSample]:
    """Return one sample for all that have the same name and labels; unknown names are left out."""
    found: dict[Key, float] = {}
    for sample in samples:
        metric = METRICS.get(metric_of(sample.name))
        if metric is None:
            continue
        key = key_of(sample)
        if key not in found:
            found[key] = sample.value
        elif metric.joined is Joined.SUM:
            found[key] += sample.value
        else:
            choose = min if metric.joined is Joined.LEAST else max
            found[key] = choose(found[key], sample.value)
    return [MetricSample(name, value, dict(labels)) for (name, labels), value in found.items()]
