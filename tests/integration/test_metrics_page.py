"""Metrics page, metrics call and health of daemons."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from support.certificate_authority import CertificateAuthority
from support.slab_agents import wait_until
from support.worker_host import WorkerHost, dump

from rankdump._wire import status_messages
from rankdump._wire.channel import CODES_BY_ERROR, TlsCredentials
from rankdump.errors import ConfigError, UnavailableError
from rankdump.wire.v1 import metrics_pb2, metrics_pb2_grpc
from rankdumpd.agent.service import DumpAgent
from rankdumpd.agent.session import registry
from rankdumpd.composition import _DaemonProcess
from rankdumpd.coordinator.service.coordinator import JobCoordinator
from rankdumpd.main import main as rankdumpd
from rankdumpd.server.audit_log import AuditLog
from rankdumpd.server.grpc_server import GrpcServer
from rankdumpd.server.metrics import MetricCounters
from rankdumpd.server.metrics_page import MetricsEndpoint, ProcessMetrics
from rankdumpd.settings import CoordinatorSettings, DaemonSettings, MetricsSettings, TlsSettings

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
ARRAY = np.arange(6, dtype=np.float32)
HERE = "127.0.0.1:0"
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class MetricsPageClient:
    """A running metrics page, and a client that reads it."""

    def __init__(
        self, *sources, tls: TlsSettings | None = None, audit: AuditLog | None = None
    ) -> None:
        self.tls, self.counters = tls or TlsSettings(), MetricCounters()
        metrics = ProcessMetrics((*sources, self.counters.samples))
        self.endpoint = MetricsEndpoint(
            HERE, metrics, self.tls, counters=self.counters, audit=audit
        )
        self.endpoint.start()

    def get(
        self,
        shown: TlsCredentials | None = None,
        *,
        accept: str = OPEN_METRICS,
        path: str = "/metrics",
    ) -> str:
        context = None
        if self.tls.on:
            context = ssl.create_default_context(cafile=self.tls.ca)
            if shown:
                context.load_cert_chain(shown.certificate, shown.key)
        url = f"http{'s' if self.tls.on else ''}://{self.endpoint.address}{path}"
        asked = urllib.request.Request(url, headers={"Accept": accept})
        with urllib.request.urlopen(asked, timeout=60, context=context) as answer:
            return answer.read().decode()

    def connected(self) -> socket.socket:
        host, _, port = self.endpoint.address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=60)

    def ask(self, request: bytes) -> bytes:
        """Send bytes without TLS; return the answer, which is empty if the connection was
        closed.
        """
        with contextlib.suppress(ConnectionError), self.connected() as asking:
            asking.sendall(request)
            with asking.makefile("rb") as answer:
                return answer.read()
        return b""

    def samples(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        return parsed(self.get())

    def refused(self) -> dict[str, float]:
        """Return how often the page rejected a request, for each reason that occurred."""
        return {s.labels["reason"]: s.value for s in self.counters.samples() if s.value}


def parsed(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return a page as parsed by the OpenMetrics parser of prometheus_client."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of(samples: Mapping[Any, float], name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


@pytest.fixture
def page_of() -> Iterator:
    with contextlib.ExitStack() as stack:

        def make(*sources, **more) -> MetricsPageClient:
            page = MetricsPageClient(*sources, **more)
            stack.callback(page.endpoint.stop)
            return page

        yield make


def test_metrics_page_parses_and_matches_the_records(make_agent, make_rank, frames, page_of):
    """Records, drops on both sides, bytes and commits agree with what the rank sent."""
    embedded = make_agent()
    page = page_of(embedded.agent.samples, embedded.counters.samples)
    rank = make_rank(embedded.address)
    rank.open()
    stream = rank.push().send(frames.record(1, ARRAY), frames.record(2, ARRAY + 1))
    stream.send(frames.end(3, 0, 5, buffer_full=2, nonsense=1))
    stream.wait_acknowledged(3)
    assert rank.drain().drained
    found = page.samples()
    assert of(found, "rankdump_agent_records_total", fate="stored") == 2
    assert of(found, "rankdump_agent_records_total", fate="dropped") == 3
    dropped = "rankdump_agent_dropped_records_total"
    assert of(found, dropped, reason="buffer_full", by="rank") == 2
    assert of(found, dropped, reason="other", by="rank") == 1
    assert of(found, dropped, reason="disk_low", by="agent") == 0
    assert of(found, "rankdump_agent_received_bytes_total") == 2 * ARRAY.nbytes
    assert of(found, "rankdump_agent_iterations_total") == 1
    assert of(found, "rankdump_agent_sessions", state="open") == 1
    assert of(found, "rankdump_agent_disk_size_bytes", root=str(rank.root)) > 0
    assert of(found, "rankdump_agent_commit_seconds_count") >= 1
    assert of(found, "process_open_fds") > 0
    # Older servers ask for the older format.
    assert "rankdump_agent_queue_bytes 0.0" in page.get(accept="text/plain")


def test_counters_do_not_fall_when_sessions_are_removed(
    make_agent, make_rank, frames, page_of, monkeypatch
):
    """Counts remain, although the agent keeps only the latest sessions."""
    monkeypatch.setattr(registry, "MAX_CLOSED_SESSIONS", 1)
    embedded = make_agent()
    page = page_of(embedded.agent.samples, embedded.counters.samples)
    kept = 0.0
    for number in range(1, 5):
        rank = make_rank(embedded.address, session_id=f"s{number}", job_id=f"j{number}")
        rank.open()
        stream = rank.push().send(frames.record(1, ARRAY), frames.end(2, 0, 1), frames.goodbye(3))
        stream.wait_acknowledged(3)
        assert stream.finish() is grpc.StatusCode.OK
        found = page.samples()
        kept = sum(value for key, value in found.items() if key[0] == "rankdump_agent_sessions")
        assert of(found, "rankdump_agent_opened_sessions_total") == number
        assert of(found, "rankdump_agent_iterations_total") == number
    assert kept < 4


def test_metrics_page_is_off_by_default_and_loopback_without_tls():
    """Nothing listens by default, and without TLS only this host is served."""

    def build_page(settings: DaemonSettings) -> tuple[MetricsEndpoint, ...]:
        process = _DaemonProcess(settings, lambda environ: settings)
        return process.build_page(ProcessMetrics(()), (), explain_fault=str)

    assert build_page(DaemonSettings()) == ()
    (endpoint,) = build_page(DaemonSettings(metrics=MetricsSettings(listen=HERE)))
    endpoint.stop()
    for address in ("0.0.0.0:0", "example.org:9", "127.0.0.1", "127.0.0.1:x", "[::]:1"):
        with pytest.raises(ConfigError, match=r"metrics\.listen"):
            MetricsEndpoint(address, ProcessMetrics(()), TlsSettings())


def test_refused_calls_start_at_zero_for_every_code():
    """Otherwise `increase()` misses the first refused call of a process."""
    process = _DaemonProcess(DaemonSettings(), lambda environ: DaemonSettings())
    found = {
        sample.labels["code"]: sample.value
        for sample in process._counters.samples()
        if sample.name == "rankdump_refused_calls_total"
    }
    assert found == dict.fromkeys({"INTERNAL", *(code.name for _, code in CODES_BY_ERROR)}, 0.0)
    assert "PERMISSION_DENIED" in found


def test_metrics_port_in_use_is_reported(page_of):
    taken = page_of().endpoint.address
    with pytest.raises(UnavailableError, match=r"metrics\.listen: .*: Address already in use"):
        MetricsEndpoint(taken, ProcessMetrics(()), TlsSettings()).start()


def test_metrics_page_serves_no_other_path(page_of):
    with pytest.raises(urllib.error.HTTPError, match="404"):
        page_of().get(path="/")


def test_failing_metric_source_leaves_the_others(page_of):
    def broken():
        raise OSError("gone")

    counters = MetricCounters()
    counters.start_at_zero("rankdump_agent_")
    found = page_of(broken, counters.samples).samples()
    assert of(found, "rankdump_agent_iterations_total") == 0


def test_metrics_page_over_tls_needs_a_reader_role(tmp_path: Path, page_of):
    """Requests without a certificate, with another role or with a revoked certificate get
    no page.
    """
    authority = CertificateAuthority(tmp_path / "ca")
    page = page_of(tls=authority.server())
    reader, rank = authority.issue("r", "reader"), authority.issue("k", "rank")
    found = parsed(page.get(reader))
    assert of(found, "rankdump_tls_not_after_timestamp_seconds") > 1.7e9
    with pytest.raises(urllib.error.HTTPError) as refused:
        page.get(rank)
    with refused.value as answer:
        assert answer.code == 403
        assert "wrong role" in answer.read().decode()
    with pytest.raises((ssl.SSLError, urllib.error.URLError, ConnectionError)):
        page.get()
    authority.revoke("r")
    with pytest.raises(urllib.error.HTTPError) as refused:
        page.get(reader)
    with refused.value as answer:
        assert "revoked" in answer.read().decode()


def written(path: Path) -> list[tuple[str, str, str, str]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(each["what"], each["method"], each["who"], each["result"]) for each in lines]


@pytest.mark.parametrize(
    ("request_line", "status", "reason"),
    [
        ("GET /secret HTTP/1.0", b" 404 ", "path"),
        ("POST /metrics HTTP/1.0", b" 501 ", "method"),
        ("GET", b" 400 ", "malformed"),
        ("GET /metrics HTTP/9.9", b" 505 ", "malformed"),
    ],
)
def test_rejected_page_requests_are_counted_and_audited(
    tmp_path: Path, page_of, request_line: str, status: bytes, reason: str
):
    """Without TLS the audit log has the caller as local."""
    audit = AuditLog(tmp_path / "audit")
    page = page_of(audit=audit)
    assert status in page.ask(f"{request_line}\r\n\r\n".encode())
    assert page.refused() == {reason: 1}
    assert written(tmp_path / "audit") == [("refused", request_line, "local", reason)]
    name = "rankdump_refused_page_requests_total"
    assert of(page.samples(), name, reason=reason) == 1
    assert page.refused() == {reason: 1}
    audit.close()


def test_unauthorised_page_requests_are_counted_and_audited(tmp_path: Path, page_of):
    """The audit log has the name in a valid certificate, else the address of the caller."""
    authority = CertificateAuthority(tmp_path / "ca")
    audit = AuditLog(tmp_path / "audit")
    page = page_of(tls=authority.server(), audit=audit)
    with pytest.raises(urllib.error.HTTPError) as refused:
        page.get(authority.issue("k", "rank"))
    refused.value.close()
    with pytest.raises((ssl.SSLError, urllib.error.URLError, ConnectionError)):
        page.get()
    page.ask(b"GET /metrics HTTP/1.0\r\n\r\n")
    wait_until(lambda: page.refused() == {"role": 1, "certificate": 2})
    wait_until(lambda: len(written(tmp_path / "audit")) == 2)
    assert written(tmp_path / "audit") == [
        ("refused", "GET /metrics HTTP/1.1", "k", "role"),
        ("refused", "", "", "certificate"),
    ]
    known, stranger = map(json.loads, (tmp_path / "audit").read_text().splitlines())
    assert (known["roles"], stranger["roles"]) == (["rank"], [])
    assert all(each["peer"].startswith("ipv4:127.0.0.1:") for each in (known, stranger))
    # Who went away without a word was refused nothing.
    page.connected().close()
    page.get(authority.issue("r", "reader"))
    assert page.refused() == {"role": 1, "certificate": 2}
    audit.close()


def test_page_requests_beyond_the_limit_are_counted(page_of):
    """The ninth connection is rejected while eight are open without a request."""
    page = page_of()
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(page.connected())
        assert page.ask(b"GET /metrics HTTP/1.0\r\n\r\n") == b""
        wait_until(lambda: page.refused() == {"busy": 1})


def test_coordinator_has_its_own_metrics(tmp_path: Path, page_of):
    coordinator = JobCoordinator(CoordinatorSettings(state_dir=str(tmp_path)))
    found = page_of(coordinator.samples).samples()
    assert of(found, "rankdump_coordinator_jobs") == 0
    assert of(found, "rankdump_coordinator_agents", state="silent") == 0
    assert not any(name.startswith("rankdump_agent") for name, _ in found)


def metrics_at(address: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    with grpc.insecure_channel(address) as channel:
        answer = metrics_pb2_grpc.MetricsServiceStub(channel).Metrics(
            metrics_pb2.MetricsRequest(), timeout=60, wait_for_ready=True
        )
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for sample in status_messages.samples_from_wire(answer)
    }


def test_metrics_of_workers_are_added_up(short_dir: Path):
    """The call is the same as of an agent without workers; its counts are sums over the workers."""
    host = WorkerHost(short_dir, 2)
    try:
        for rank in range(4):
            with host.session(rank) as session:
                session.step(0)
                dump(session, [ARRAY, ARRAY + 1])
        found = metrics_at(host.address)
    finally:
        host.close()
    assert of(found, "rankdump_agent_records_total", fate="stored") == 8
    assert of(found, "rankdump_agent_opened_sessions_total") >= 4
    assert of(found, "rankdump_agent_worker_restarts_total") == 0


def test_health_changes_before_ranks_are_drained(short_dir: Path, monkeypatch):
    """Load balancers see the change of health before ranks are drained."""
    address = f"unix:{short_dir}/d.sock"
    seen: list[int] = []
    serves, gone, over = threading.Event(), threading.Event(), threading.Event()
    start, drain = GrpcServer.start, DumpAgent.drain

    def watch() -> None:
        with grpc.insecure_channel(address) as channel, contextlib.suppress(grpc.RpcError):
            stub: Any = health_pb2_grpc.HealthStub(channel)
            for answer in stub.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True):
                seen.append(answer.status)
                (gone if answer.status == NOT_SERVING else serves).set()
        over.set()

    watcher = threading.Thread(target=watch)

    def started(self: GrpcServer) -> str:
        bound = start(self)
        watcher.start()
        assert serves.wait(60)
        os.kill(os.getpid(), signal.SIGTERM)
        return bound

    def drained(self: DumpAgent, timeout_s: float) -> int:
        # Streams are told by what is called here.
        told.append(gone.wait(60))
        return drain(self, timeout_s)

    told: list[bool] = []
    monkeypatch.setattr(GrpcServer, "start", started)
    monkeypatch.setattr(DumpAgent, "drain", drained)
    monkeypatch.setenv("RANKDUMPD_AGENT__NICE", "0")
    arguments = ["standalone", "--socket", f"{short_dir}/d.sock", "--state-dir", f"{short_dir}/s"]
    done = CliRunner().invoke(rankdumpd, arguments)
    assert over.wait(60)
    watcher.join()
    assert (done.exit_code, told) == (0, [True]), done.output
    assert seen[0] != NOT_SERVING
