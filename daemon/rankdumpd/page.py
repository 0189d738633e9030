"""The page of metrics over HTTP or HTTPS; the words on it are prometheus_client's."""

from __future__ import annotations

import http.server
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from rankdump.contract.errors import ConfigError
from rankdump.contract.room import MetricSample
from rankdumpd.callers import LOCAL, Caller, refusal, roles_in, stranger
from rankdumpd.metric_names import METRICS, Kind, metric_of
from rankdumpd.refusals import Refusals
from rankdumpd.settings import TlsSettings
from rankdumpd.tls import Certificates, Revoked, fingerprint_of

PATH = "/metrics"
METHOD = "/rankdump.wire.v1.MetricsService/Metrics"
"""Who may call this may read the page."""
_PATIENCE_S = 10.0
_MOST_AT_ONCE = 8

_log = logging.getLogger(__name__)


def registry_of(samples: Callable[[], Sequence[MetricSample]]) -> CollectorRegistry:
    """Return what an encoder asks: samples of this moment, and those of the process itself."""
    registry = CollectorRegistry()
    registry.register(_Collector(samples))
    ProcessCollector(registry=registry)
    return registry


class Guard:
    """Who may read the page over TLS, by files that may change."""

    def __init__(self, settings: TlsSettings) -> None:
        """ConfigError when the files cannot be read."""
        self._settings = settings
        self._certificates = Certificates(settings)
        self._revoked = Revoked(Path(settings.revoked)) if settings.revoked else None
        self._lock = threading.Lock()
        self._seen = self._certificates.material()
        self._context = self._made()

    @property
    def expires_s(self) -> float:
        """End of the time of the certificate that is shown, in seconds since the epoch."""
        return self._certificates.material().expires_s

    def context(self) -> ssl.SSLContext:
        """Return what connections are made with, as the files are now."""
        with self._lock:
            material = self._certificates.material()
            if material != self._seen:
                try:
                    self._context = self._made()
                    self._seen = material
                except (OSError, ConfigError) as error:
                    # Changed once more in this moment: the next connection looks again.
                    _log.warning("the page shows the certificate it had: %s", error)
            return self._context

    def refusal(self, caller: Caller) -> str:
        """Return why the page is not for who has connected; empty when it is."""
        listed = self._revoked.listed() if self._revoked else frozenset[str]()
        return refusal(METHOD, caller, revoked=listed)

    def _made(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(self._settings.ca)
        context.load_cert_chain(self._settings.certificate, self._settings.key)
        return context


class PageServer(http.server.ThreadingHTTPServer):
    """Answers a few at once; who dawdles holds up nobody."""

    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        address: tuple[str, int],
        registry: CollectorRegistry,
        guard: Guard | None,
        refusals: Refusals,
    ) -> None:
        """Listen; OSError when it cannot."""
        self.registry, self.guard, self.refusals = registry, guard, refusals
        self._places = threading.BoundedSemaphore(_MOST_AT_ONCE)
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without asking who this host is: that may take long."""
        # As the class above does, but for its last step.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Turn away those for whom there is no place."""
        placed = self._places.acquire(blocking=False)
        if not placed:
            # Not written down: all others wait for this thread.
            self.refusals.count("busy")
        return placed

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one connection, then free its place."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Serve one connection; the handshake is part of it, in its own thread."""
        request.settimeout(_PATIENCE_S)
        if self.guard is None:
            super().finish_request(request, client_address)
            return
        with self._secured(request, self.guard, _peer_of(client_address)) as secured:
            super().finish_request(secured, client_address)

    def _secured(self, request: Any, guard: Guard, peer: str) -> ssl.SSLSocket:
        try:
            return guard.context().wrap_socket(request, server_side=True)
        except ssl.SSLEOFError:
            # Gone before it was asked anything.
            raise
        except ssl.SSLError as error:
            why = f"a handshake failed: {(error.reason or str(error)).lower().replace('_', ' ')}"
            self.refusals.add("certificate", stranger(peer), "", why)
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say little of what others do wrong."""
        _log.debug("a connection from %s failed", client_address, exc_info=True)


class _Handler(http.server.BaseHTTPRequestHandler):
    server_version = "rankdumpd"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer with the page, in the format that is asked for."""
        server = self.server
        assert isinstance(server, PageServer)
        if self.path.partition("?")[0] != PATH:
            self._refuse(HTTPStatus.NOT_FOUND, "path", f"metrics are at {PATH}")
            return
        why = server.guard.refusal(self._caller()) if server.guard else ""
        if why:
            self._refuse(HTTPStatus.FORBIDDEN, "role", why)
            return
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        self._answer(HTTPStatus.OK, content_type, encode(server.registry))

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the base class
        """Say nothing of what happens four times a minute."""
        _log.debug(format, *args)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what is no request, or none for a page; the base class finds that out."""
        other_method = code == HTTPStatus.NOT_IMPLEMENTED
        reason = "method" if other_method else "malformed"
        self._note(reason, message or HTTPStatus(code).phrase)
        super().send_error(code, message, explain)

    def _refuse(self, status: HTTPStatus, reason: str, why: str) -> None:
        self._note(reason, why)
        self._answer(status, "text/plain", f"{why}\n".encode())

    def _note(self, reason: str, why: str) -> None:
        assert isinstance(self.server, PageServer)
        self.server.refusals.add(reason, self._caller(), self.requestline, why)

    def _caller(self) -> Caller:
        if not isinstance(self.connection, ssl.SSLSocket):
            return LOCAL
        return _caller(self.connection, _peer_of(self.client_address))

    def _answer(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _Collector(Collector):
    def __init__(self, samples: Callable[[], Sequence[MetricSample]]) -> None:
        self._samples = samples

    def describe(self) -> list[Family]:
        """Return nothing: what there is comes with its samples."""
        return []

    def collect(self) -> Iterator[Family]:
        """Yield all samples, by their metrics."""
        families: dict[str, Family] = {}
        for sample in self._samples():
            name = metric_of(sample.name)
            if name not in families:
                families[name] = _family(name)
            families[name].add_sample(sample.name, dict(sample.labels), sample.value)
        yield from families.values()


def _family(name: str) -> Family:
    metric = METRICS[name]
    bare = name.removesuffix("_total") if metric.kind is Kind.COUNTER else name
    bare = bare.removesuffix("_info") if metric.kind is Kind.INFO else bare
    return Family(bare, metric.text, metric.kind.value)


def _peer_of(address: Any) -> str:
    """Return an address as gRPC writes that of a caller."""
    host, port = address[:2]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def _caller(connection: ssl.SSLSocket, peer: str) -> Caller:
    """Return who has connected, by the certificate that was believed in the handshake."""
    der, shown = connection.getpeercert(binary_form=True), connection.getpeercert()
    if not der or not shown:
        return stranger(peer)
    fields: Any = shown
    uris = [value for kind, value in fields.get("subjectAltName", ()) if kind == "URI"]
    names = [v for part in fields.get("subject", ()) for k, v in part if k == "commonName"]
    fingerprint = fingerprint_of(ssl.DER_cert_to_PEM_cert(der).encode())
    return Caller("".join(names[:1]), roles_in(uris), fingerprint, peer)
