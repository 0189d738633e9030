"""Metrics endpoint: the gRPC service of metrics, the HTTP server of metrics, health and pages as a
component, and the handling of refused requests, which are counted, audited and logged.
prometheus_client writes the exposition format.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

import grpc
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from rankdump._core.caller_roles import CallerIdentity
from rankdump._core.daemon_endpoint import is_loopback, parse_tcp_address
from rankdump._core.log_once import LogOnce
from rankdump._core.status import MetricSample
from rankdump._http.server_guard import HttpsGuard
from rankdump._wire import status_messages
from rankdump.errors import ConfigError, UnavailableError
from rankdump.wire.v1 import metrics_pb2, metrics_pb2_grpc
from rankdumpd.server import lifecycle
from rankdumpd.server.audit_log import AuditLog
from rankdumpd.server.background_thread import BackgroundThread
from rankdumpd.server.metrics import (
    METRIC_DEFINITIONS,
    MetricCounters,
    MetricKind,
    aggregate_samples,
    find_metric_name,
)
from rankdumpd.server.tls import ServerCertificates
from rankdumpd.settings import TlsSettings

if TYPE_CHECKING:
    from rankdump._http.http_server import HttpServer
    from rankdumpd.server.page_process import PageProcess

PAGE_REFUSALS_METRIC = "rankdump_refused_page_requests_total"
AUDIT_INTERVAL_S = 1.0
"""Shortest time in seconds between two audit lines about callers without a trusted certificate."""

_logger = logging.getLogger(__name__)


class PageRefusals:
    """Counts, audits and logs refused HTTP requests; safe to use from several threads.

    Anyone who reaches the port can cause refusals. Callers without a trusted certificate therefore
    get one audit line a second, with the number of refusals in between, so that they cannot
    displace other entries. All refusals are counted.
    """

    def __init__(
        self,
        counters: MetricCounters,
        audit: AuditLog | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the counters at 0; `clock` returns seconds of a monotonic clock."""
        self._counters, self._audit, self._clock = counters, audit, clock
        self._counters.start_at_zero(PAGE_REFUSALS_METRIC)
        self._lock = threading.Lock()
        self._logged = LogOnce(_logger)
        self._next_audit_s = 0.0
        self._unaudited = 0

    def count(self, reason: str) -> None:
        """Count a refused request of which only the reason is known."""
        self._counters.add(PAGE_REFUSALS_METRIC, reason=reason)

    def add(self, reason: str, caller: CallerIdentity, request: str, why: str) -> None:
        """Count and audit a refused request; each reason is logged once."""
        self.count(reason)
        text = f"the metrics page refused a request: {why}"
        self._logged.log(logging.WARNING, text, about=reason)
        if self._audit is None:
            return
        more = 0 if caller.is_known else self._count_unaudited()
        if more is not None:
            fields = {"method": request, **caller.audit_fields(), "result": reason}
            self._audit.add("refused", {**fields, "more": more} if more else fields)

    def _count_unaudited(self) -> int | None:
        """Return the number of refusals since the last audit line; None if this refusal gets no
        line either.
        """
        with self._lock:
            now_s = self._clock()
            if now_s < self._next_audit_s:
                self._unaudited += 1
                return None
            self._next_audit_s = now_s + AUDIT_INTERVAL_S
            unaudited, self._unaudited = self._unaudited, 0
            return unaudited


_THREADS = 8
"""Number of answers that are computed at the same time."""
_MAX_CONNECTIONS = 8
_MAX_PAGE_CONNECTIONS = 256
"""Largest number of connections if the server also has pages: one browser opens up to six."""


def build_registry(samples: Callable[[], Sequence[MetricSample]]) -> CollectorRegistry:
    """Return the registry to encode: the current samples, and the metrics of the process itself."""
    registry = CollectorRegistry()
    registry.register(_SampleCollector(samples))
    ProcessCollector(registry=registry)
    return registry


class _SampleCollector(Collector):
    def __init__(self, samples: Callable[[], Sequence[MetricSample]]) -> None:
        self._samples = samples

    def describe(self) -> list[Family]:
        """Return nothing, because each metric is described together with its samples."""
        return []

    def collect(self) -> Iterator[Family]:
        """Yield all samples, grouped by metric."""
        families: dict[str, Family] = {}
        for sample in self._samples():
            name = find_metric_name(sample.name)
            if name not in families:
                families[name] = _build_family(name)
            families[name].add_sample(sample.name, dict(sample.labels), sample.value)
        yield from families.values()


def _build_family(name: str) -> Family:
    metric = METRIC_DEFINITIONS[name]
    bare = name.removesuffix("_total") if metric.kind is MetricKind.COUNTER else name
    bare = bare.removesuffix("_info") if metric.kind is MetricKind.INFO else bare
    return Family(bare, metric.help_text, metric.kind.value)


SampleSource = Callable[[], Sequence[MetricSample]]


class ProcessMetrics(metrics_pb2_grpc.MetricsServiceServicer):
    """All metrics of a process, for the gRPC service and for the HTTP path `/metrics`."""

    service_names: tuple[str, ...] = (
        metrics_pb2.DESCRIPTOR.services_by_name["MetricsService"].full_name,
    )

    def __init__(self, sources: Sequence[SampleSource]) -> None:
        self._sources = sources
        self._start_s = time.time()
        self._logged = LogOnce(_logger)

    def register(self, server: grpc.Server) -> None:
        """Add the service to a server that has not started."""
        metrics_pb2_grpc.add_MetricsServiceServicer_to_server(self, server)

    def Metrics(  # noqa: N802 - the name is the generated base class's
        self, request: metrics_pb2.MetricsRequest, context: grpc.ServicerContext
    ) -> metrics_pb2.MetricsResponse:
        """Return the current samples."""
        return status_messages.samples_to_wire(self.samples())

    def samples(self) -> list[MetricSample]:
        """Return the samples of all sources; a source that fails is left out."""
        found = [
            MetricSample("rankdump_build_info", 1, {"version": version("rankdump")}),
            MetricSample("rankdump_start_time_seconds", self._start_s),
        ]
        for number, source in enumerate(self._sources):
            try:
                found += source()
                self._logged.forget(str(number))
            except Exception as error:
                # One failing source must not hide the others, which are most useful when something
                # is broken.
                text = f"the metrics of one source are omitted: {error!r}"
                self._logged.log(logging.ERROR, text, about=str(number))
        return aggregate_samples(found)


def parse_metrics_address(address: str, *, has_tls: bool) -> tuple[str, int]:
    """Return host and port; ConfigError for an invalid address, and for one that is open to all
    hosts.
    """
    found = parse_tcp_address(address)
    if found is None or not (has_tls or is_loopback(address)):
        allowed = "host:port on loopback, or any host:port with certificates ([tls])"
        raise ConfigError("settings", "metrics.listen", address, allowed)
    return found


class MetricsEndpoint(lifecycle.Component):
    """Metrics and health over HTTP or, with certificates, over HTTPS for roles that may read; the
    last component to stop.
    """

    def __init__(
        self,
        address: str,
        metrics: ProcessMetrics,
        tls: TlsSettings,
        *,
        counters: MetricCounters | None = None,
        audit: AuditLog | None = None,
        explain_fault: Callable[[], str] = lambda: "",
        pages: PageProcess | None = None,
    ) -> None:
        """`explain_fault` returns why the daemon is not healthy. ConfigError when the address would
        be open to all hosts, or when certificates cannot be read.
        """
        self._host, self._port = parse_metrics_address(address, has_tls=tls.on)
        self._certificates = ServerCertificates(tls) if tls.on else None
        self._guard = build_guard(tls) if tls.on else None
        self._metrics, self._explain_fault, self._pages = metrics, explain_fault, pages
        self._refusals = PageRefusals(counters or MetricCounters(), audit)
        self._server: HttpServer | None = None
        self._thread: BackgroundThread | None = None

    @property
    def address(self) -> str:
        """Address of the server; after the start with the port that was bound."""
        return f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"

    def start(self) -> None:
        """Listen at the address; UnavailableError when that is not possible now, ConfigError when a
        module is not installed.
        """
        try:
            from rankdump._http.http_server import bind_listener
        except ModuleNotFoundError as error:
            allowed = f"nothing without the module {error.name} (pip install 'rankdump[daemon]')"
            raise ConfigError("settings", "metrics.listen", self.address, allowed) from None
        try:
            listening = bind_listener(self._host, self._port)
        except OSError as error:
            cause = error.strerror or str(error)
            raise UnavailableError(
                f"metrics.listen: {self.address} cannot be bound: {cause}"
            ) from None
        self._port = listening.getsockname()[1]
        self._server = self._build_server(listening)
        if self._pages:
            self._pages.start()
        self._thread = BackgroundThread(self._server.run, "rankdumpd-metrics")
        self._thread.start()
        _logger.info("metrics are served at %s/metrics", self.address)

    def drain(self, timeout_s: float) -> int:
        """Do nothing: the server continues, so that metrics show the progress of the drain."""
        return 0

    def stop(self) -> None:
        """Stop listening; may be repeated, and called without `start`."""
        if self._server and self._thread:
            self._server.request_stop()
            self._thread.stop()
            self._server = self._thread = None
        if self._pages:
            self._pages.stop()

    def _build_server(self, listening: socket.socket) -> HttpServer:
        from rankdump._http.http_server import HttpServer
        from rankdumpd.server.http_application import make_application

        application = make_application(
            build_registry(self._samples),
            self._explain_fault,
            guard=self._guard,
            refusals=self._refusals,
            pages=self._pages,
        )
        return HttpServer(
            application,
            listening,
            refusals=self._refusals,
            guard=self._guard,
            max_connections=_MAX_PAGE_CONNECTIONS if self._pages else _MAX_CONNECTIONS,
            threads=_THREADS,
        )

    def _samples(self) -> list[MetricSample]:
        found = self._metrics.samples()
        if self._certificates:
            expires_s = self._certificates.read_material().expires_s
            found.append(MetricSample("rankdump_tls_not_after_timestamp_seconds", expires_s))
        return found


def build_guard(tls: TlsSettings) -> HttpsGuard:
    """Return the access control of an HTTP server; ConfigError when files cannot be read."""
    return HttpsGuard(ca=tls.ca, certificate=tls.certificate, key=tls.key, revoked=tls.revoked)
