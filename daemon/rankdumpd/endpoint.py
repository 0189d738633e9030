"""What monitoring reads of a process: one service on the wire, one page for Prometheus."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Protocol

import grpc

from rankdump.contract.addresses import is_loopback
from rankdump.contract.errors import ConfigError
from rankdump.contract.room import MetricSample
from rankdump.wire import views
from rankdump.wire.v1 import metrics_pb2, metrics_pb2_grpc
from rankdumpd import lifecycle
from rankdumpd.audit import Audit
from rankdumpd.meters import Meters
from rankdumpd.metric_names import joined
from rankdumpd.page import PATH, Guard, PageServer, registry_of
from rankdumpd.refusals import Refusals
from rankdumpd.settings import Settings, TlsSettings

Source = Callable[[], Sequence[MetricSample]]

_log = logging.getLogger(__name__)


class Half(Protocol):
    """An agent, its front or a coordinator."""

    def samples(self) -> list[MetricSample]:
        """Return how it stands."""
        ...


class Metrics(metrics_pb2_grpc.MetricsServiceServicer):
    """All numbers of a process; a service that a server can have, and what the page shows."""

    service_names: tuple[str, ...] = (
        metrics_pb2.DESCRIPTOR.services_by_name["MetricsService"].full_name,
    )

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._begun_s = time.time()
        self._failing: set[int] = set()

    def register(self, server: grpc.Server) -> None:
        """Add the service to a server that has not started."""
        metrics_pb2_grpc.add_MetricsServiceServicer_to_server(self, server)

    def Metrics(  # noqa: N802 - the name is the generated base class's
        self, request: metrics_pb2.MetricsRequest, context: grpc.ServicerContext
    ) -> metrics_pb2.MetricsResponse:
        """Return the samples of this moment."""
        return views.samples_to_wire(self.samples())

    def samples(self) -> list[MetricSample]:
        """Return what all sources say; one that fails leaves its own numbers out."""
        found = [
            MetricSample("rankdump_build_info", 1, {"version": version("rankdump")}),
            MetricSample("rankdump_start_time_seconds", self._begun_s),
        ]
        for number, source in enumerate(self._sources):
            try:
                found += source()
                self._failing.discard(number)
            except Exception as error:
                # Monitoring has to see the rest above all when something is broken.
                if number not in self._failing:
                    _log.error("numbers are left out: %r", error)
                self._failing.add(number)
        return joined(found)


class Endpoint(lifecycle.Room):
    """The page that Prometheus asks for, over HTTP or, with certificates, over HTTPS for those
    with a role that may read; the last room to stop.
    """

    def __init__(
        self,
        address: str,
        metrics: Metrics,
        tls: TlsSettings,
        *,
        meters: Meters | None = None,
        audit: Audit | None = None,
    ) -> None:
        """ConfigError when anybody could read it, or certificates cannot be read."""
        host, _, port = address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not port.isdecimal() or int(port) > 0xFFFF or not (tls.on or is_loopback(address)):
            allowed = "host:port on loopback, or any host:port with certificates ([tls])"
            raise ConfigError("settings", "metrics.listen", address, allowed)
        self._host, self._port = host, int(port)
        self._guard = Guard(tls) if tls.on else None
        self._metrics = metrics
        self._refusals = Refusals(meters or Meters(), audit)
        self._server: PageServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """Where it listens once it has started, with the real port."""
        port = self._server.server_address[1] if self._server else self._port
        return f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"

    def start(self) -> None:
        """Listen; ConfigError when the port is taken."""
        registry = registry_of(self._samples)
        try:
            place = (self._host, self._port)
            self._server = PageServer(place, registry, self._guard, self._refusals)
        except OSError as error:
            allowed = f"an address that is free ({error.strerror})"
            raise ConfigError("settings", "metrics.listen", self.address, allowed) from None
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="rankdumpd-metrics", daemon=True
        )
        self._thread.start()
        _log.info("metrics are at %s%s", self.address, PATH)

    def drain(self, timeout_s: float) -> int:
        """Go on: how a drain proceeds is worth seeing."""
        return 0

    def stop(self) -> None:
        """Listen no more; may be repeated, and called without `start`."""
        if self._server and self._thread:
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()
            self._server = self._thread = None

    def _samples(self) -> list[MetricSample]:
        found = self._metrics.samples()
        if self._guard:
            found.append(
                MetricSample("rankdump_tls_not_after_timestamp_seconds", self._guard.expires_s)
            )
        return found


def measured(
    settings: Settings, meters: Meters, *halves: Half, audit: Audit | None = None
) -> tuple[Metrics, tuple[Endpoint, ...]]:
    """Return what a process says of itself, and the page with it where one is wished for."""
    metrics = Metrics((meters.samples, *(half.samples for half in halves)))
    listen = settings.metrics.listen
    if not listen:
        return metrics, ()
    return metrics, (Endpoint(listen, metrics, settings.tls, meters=meters, audit=audit),)
