"""Metrics endpoint: the gRPC service, the page for Prometheus over HTTP or HTTPS, and the requests
that the page refused, which are counted, audited and logged. The exposition format is
prometheus_client's.
"""

from __future__ import annotations

import http.server
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import grpc
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from rankdump._core.caller_roles import (
    LOCAL_CALLER,
    CallerIdentity,
    build_unknown_caller,
    explain_refusal,
    parse_roles,
)
from rankdump._core.daemon_endpoint import is_loopback
from rankdump._core.log_once import LogOnce
from rankdump._core.revoked_certificates import RevokedCertificates, compute_fingerprint
from rankdump._core.status import MetricSample
from rankdump._wire import status_messages
from rankdump.errors import ConfigError
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
from rankdumpd.settings import DaemonSettings, TlsSettings

PAGE_REFUSALS_METRIC = "rankdump_refused_page_requests_total"
AUDIT_INTERVAL_S = 1.0
"""Shortest time between two audit lines about callers without a trusted certificate."""

_logger = logging.getLogger(__name__)


class PageRefusals:
    """Counts, audits and logs refused requests; safe to use from several threads.

    Anyone who reaches the port can cause refusals. For callers without a trusted certificate one
    audit line a second is written, with the number of refusals in between, so that they cannot
    displace other entries. All refusals are counted.
    """

    def __init__(
        self,
        counters: MetricCounters,
        audit: AuditLog | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the counters at 0; `clock` is monotonic, in seconds."""
        self._counters, self._audit, self._clock = counters, audit, clock
        self._counters.start_at_zero(PAGE_REFUSALS_METRIC)
        self._lock = threading.Lock()
        self._logged = LogOnce(_logger)
        self._next_audit_s = 0.0
        self._unaudited = 0

    def count(self, reason: str) -> None:
        """Count a refusal of which only the reason is known."""
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
        """Return how many refusals were not audited before this one; None to skip this one too."""
        with self._lock:
            now_s = self._clock()
            if now_s < self._next_audit_s:
                self._unaudited += 1
                return None
            self._next_audit_s = now_s + AUDIT_INTERVAL_S
            unaudited, self._unaudited = self._unaudited, 0
            return unaudited


METRICS_PATH = "/metrics"
METRICS_METHOD = "/rankdump.wire.v1.MetricsService/Metrics"
"""Method whose roles may read the page."""
_REQUEST_TIMEOUT_S = 10.0
_MAX_CONNECTIONS = 8


def build_registry(samples: Callable[[], Sequence[MetricSample]]) -> CollectorRegistry:
    """Return the registry for an encoder: current samples, and those of the process itself."""
    registry = CollectorRegistry()
    registry.register(_SampleCollector(samples))
    ProcessCollector(registry=registry)
    return registry


class MetricsPageGuard:
    """Access to the page over TLS, by certificate files that may change while it serves."""

    def __init__(self, settings: TlsSettings) -> None:
        """ConfigError when the files cannot be read."""
        self._settings = settings
        self._certificates = ServerCertificates(settings)
        self._revoked = RevokedCertificates(Path(settings.revoked)) if settings.revoked else None
        self._lock = threading.Lock()
        self._seen = self._certificates.read_material()
        self._context = self._build_context()

    @property
    def expires_s(self) -> float:
        """End of validity of the server certificate, in seconds since the epoch."""
        return self._certificates.read_material().expires_s

    def get_context(self) -> ssl.SSLContext:
        """Return the TLS context for new connections, from the files as they are now."""
        with self._lock:
            material = self._certificates.read_material()
            if material != self._seen:
                try:
                    self._context = self._build_context()
                    self._seen = material
                except (OSError, ConfigError) as error:
                    # The files changed again: the next connection reads them.
                    _logger.warning(
                        "metrics page: the new certificate files cannot be used: %s",
                        error,
                    )
            return self._context

    def explain_refusal(self, caller: CallerIdentity) -> str:
        """Return why a caller may not read the page; empty when it may."""
        listed = self._revoked.read_fingerprints() if self._revoked else frozenset[str]()
        return explain_refusal(METRICS_METHOD, caller, revoked=listed)

    def _build_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(self._settings.ca)
        context.load_cert_chain(self._settings.certificate, self._settings.key)
        return context


class MetricsPageServer(http.server.ThreadingHTTPServer):
    """HTTP server with a few connections at a time; a slow client does not delay others."""

    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        address: tuple[str, int],
        registry: CollectorRegistry,
        guard: MetricsPageGuard | None,
        refusals: PageRefusals,
    ) -> None:
        """Listen; OSError when the address cannot be bound."""
        self.registry, self.guard, self.refusals = registry, guard, refusals
        self._connections = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _MetricsPageHandler)

    def server_bind(self) -> None:
        """Bind without a lookup of the host's name, which may take long."""
        # As in the base class, without the lookup.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Refuse a connection when there are too many."""
        accepted = self._connections.acquire(blocking=False)
        if not accepted:
            # Not audited, because all other connections wait for this thread.
            self.refusals.count("busy")
        return accepted

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one connection, then release its slot."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Serve one connection, with its TLS handshake, in its own thread."""
        request.settimeout(_REQUEST_TIMEOUT_S)
        if self.guard is None:
            super().finish_request(request, client_address)
            return
        with self._wrap_connection(request, self.guard, _format_peer(client_address)) as secured:
            super().finish_request(secured, client_address)

    def _wrap_connection(self, request: Any, guard: MetricsPageGuard, peer: str) -> ssl.SSLSocket:
        try:
            return guard.get_context().wrap_socket(request, server_side=True)
        except ssl.SSLEOFError:
            # The client left before it sent anything.
            raise
        except ssl.SSLError as error:
            why = f"a handshake failed: {(error.reason or str(error)).lower().replace('_', ' ')}"
            self.refusals.add("certificate", build_unknown_caller(peer), "", why)
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log failed connections at debug level, because clients cause them."""
        _logger.debug("a connection from %s failed", client_address, exc_info=True)


class _MetricsPageHandler(http.server.BaseHTTPRequestHandler):
    server_version = "rankdumpd"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer with the page, in the format that the client accepts."""
        server = self.server
        assert isinstance(server, MetricsPageServer)
        if self.path.partition("?")[0] != METRICS_PATH:
            self._refuse(HTTPStatus.NOT_FOUND, "path", f"metrics are at {METRICS_PATH}")
            return
        why = server.guard.explain_refusal(self._caller()) if server.guard else ""
        if why:
            self._refuse(HTTPStatus.FORBIDDEN, "role", why)
            return
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        self._answer(HTTPStatus.OK, content_type, encode(server.registry))

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the base class
        """Log requests at debug level, because one arrives every few seconds."""
        _logger.debug(format, *args)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a malformed request or another method, which the base class has detected."""
        other_method = code == HTTPStatus.NOT_IMPLEMENTED
        reason = "method" if other_method else "malformed"
        self._note_refusal(reason, message or HTTPStatus(code).phrase)
        super().send_error(code, message, explain)

    def _refuse(self, status: HTTPStatus, reason: str, why: str) -> None:
        self._note_refusal(reason, why)
        self._answer(status, "text/plain", f"{why}\n".encode())

    def _note_refusal(self, reason: str, why: str) -> None:
        assert isinstance(self.server, MetricsPageServer)
        self.server.refusals.add(reason, self._caller(), self.requestline, why)

    def _caller(self) -> CallerIdentity:
        if not isinstance(self.connection, ssl.SSLSocket):
            return LOCAL_CALLER
        return _identify_page_caller(self.connection, _format_peer(self.client_address))

    def _answer(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _SampleCollector(Collector):
    def __init__(self, samples: Callable[[], Sequence[MetricSample]]) -> None:
        self._samples = samples

    def describe(self) -> list[Family]:
        """Return nothing: metrics are described with their samples."""
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


def _format_peer(address: Any) -> str:
    """Return an address in the form in which gRPC names a peer."""
    host, port = address[:2]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def _identify_page_caller(connection: ssl.SSLSocket, peer: str) -> CallerIdentity:
    """Return the caller of a connection, by the certificate that the handshake verified."""
    der, shown = connection.getpeercert(binary_form=True), connection.getpeercert()
    if not der or not shown:
        return build_unknown_caller(peer)
    fields: Any = shown
    uris = [value for kind, value in fields.get("subjectAltName", ()) if kind == "URI"]
    names = [v for part in fields.get("subject", ()) for k, v in part if k == "commonName"]
    fingerprint = compute_fingerprint(ssl.DER_cert_to_PEM_cert(der).encode())
    return CallerIdentity("".join(names[:1]), parse_roles(uris), fingerprint, peer)


SampleSource = Callable[[], Sequence[MetricSample]]


class MetricsProvider(Protocol):
    """Source of metrics: an agent, a supervisor of workers or a coordinator."""

    def samples(self) -> list[MetricSample]:
        """Return the current samples."""
        ...


class ProcessMetrics(metrics_pb2_grpc.MetricsServiceServicer):
    """All metrics of a process: a gRPC service, and the content of the page."""

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
        """Return the samples of all sources but those that fail."""
        found = [
            MetricSample("rankdump_build_info", 1, {"version": version("rankdump")}),
            MetricSample("rankdump_start_time_seconds", self._start_s),
        ]
        for number, source in enumerate(self._sources):
            try:
                found += source()
                self._logged.forget(str(number))
            except Exception as error:
                # The metrics of other sources are most useful when something is broken.
                text = f"the metrics of one source are omitted: {error!r}"
                self._logged.log(logging.ERROR, text, about=str(number))
        return aggregate_samples(found)


class MetricsEndpoint(lifecycle.Component):
    """The page for Prometheus, over HTTP or, with certificates, over HTTPS for roles that may read;
    the last component to stop.
    """

    def __init__(
        self,
        address: str,
        metrics: ProcessMetrics,
        tls: TlsSettings,
        *,
        counters: MetricCounters | None = None,
        audit: AuditLog | None = None,
    ) -> None:
        """ConfigError when the page would be open to all hosts, or certificates cannot be read."""
        host, _, port = address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not port.isdecimal() or int(port) > 0xFFFF or not (tls.on or is_loopback(address)):
            allowed = "host:port on loopback, or any host:port with certificates ([tls])"
            raise ConfigError("settings", "metrics.listen", address, allowed)
        self._host, self._port = host, int(port)
        self._guard = MetricsPageGuard(tls) if tls.on else None
        self._metrics = metrics
        self._refusals = PageRefusals(counters or MetricCounters(), audit)
        self._server: MetricsPageServer | None = None
        self._thread: BackgroundThread | None = None

    @property
    def address(self) -> str:
        """Address of the page, with the real port once it has started."""
        port = self._server.server_address[1] if self._server else self._port
        return f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"

    def start(self) -> None:
        """Listen; ConfigError when the port is taken."""
        registry = build_registry(self._samples)
        try:
            address = (self._host, self._port)
            self._server = MetricsPageServer(address, registry, self._guard, self._refusals)
        except OSError as error:
            allowed = f"an address that is free ({error.strerror})"
            raise ConfigError("settings", "metrics.listen", self.address, allowed) from None
        self._thread = BackgroundThread(self._server.serve_forever, "rankdumpd-metrics")
        self._thread.start()
        _logger.info("metrics are served at %s%s", self.address, METRICS_PATH)

    def drain(self, timeout_s: float) -> int:
        """Continue to serve, so that metrics show the progress of the drain."""
        return 0

    def stop(self) -> None:
        """Stop listening; may be repeated, and called without `start`."""
        if self._server and self._thread:
            self._server.shutdown()
            self._thread.stop()
            self._server.server_close()
            self._server = self._thread = None

    def _samples(self) -> list[MetricSample]:
        found = self._metrics.samples()
        if self._guard:
            found.append(
                MetricSample("rankdump_tls_not_after_timestamp_seconds", self._guard.expires_s)
            )
        return found


def build_metrics(
    settings: DaemonSettings,
    counters: MetricCounters,
    *providers: MetricsProvider,
    audit: AuditLog | None = None,
) -> tuple[ProcessMetrics, tuple[MetricsEndpoint, ...]]:
    """Return the metrics of a process, and the page with them if settings ask for one."""
    metrics = ProcessMetrics((counters.samples, *(provider.samples for provider in providers)))
    listen = settings.metrics.listen
    if not listen:
        return metrics, ()
    return metrics, (
        MetricsEndpoint(listen, metrics, settings.tls, counters=counters, audit=audit),
    )
