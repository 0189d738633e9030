"""Pages of the trees of jobs, beside metrics and health of their coordinator."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.certificate_authority import CertificateAuthority
from support.reporting_agent import PATIENCE_S, ReportedJob, ReportingAgent
from support.slab_agents import wait_until
from support.web_trees import fill_tree

from rankdump._core.status import StatusView
from rankdump._wire.channel import TlsCredentials, open_channel
from rankdump.errors import ConfigError
from rankdump.wire.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from rankdumpd import composition
from rankdumpd.composition import _DaemonProcess
from rankdumpd.server.metrics_page import MetricsEndpoint, ProcessMetrics
from rankdumpd.server.page_process import PageProcess, make_request, parse_head
from rankdumpd.settings import (
    CoordinatorSettings,
    DaemonSettings,
    MetricsSettings,
    TlsSettings,
    load_settings,
)

JOB = "llm"


class HttpsReader:
    """Reads over HTTP or HTTPS, one connection for each request."""

    def __init__(self, address: str, tls: TlsSettings | None = None) -> None:
        self.address, self.tls = address, tls

    def get(
        self, path: str, shown: TlsCredentials | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        with self.open(path, shown) as answer:
            return answer.status, dict(answer.headers), answer.read()

    def open(self, path: str, shown: TlsCredentials | None = None) -> http.client.HTTPResponse:
        if self.tls is None:
            asking = http.client.HTTPConnection(self.address, timeout=PATIENCE_S)
        else:
            context = ssl.create_default_context(cafile=self.tls.ca)
            if shown:
                context.load_cert_chain(shown.certificate, shown.key)
            asking = http.client.HTTPSConnection(self.address, timeout=PATIENCE_S, context=context)
        asking.request("GET", path, headers={"connection": "close"})
        return asking.getresponse()


def start_coordinator(folder: Path, tls: TlsSettings) -> subprocess.Popen[str]:
    names = {
        "COORDINATOR__LISTEN": "127.0.0.1:0",
        "COORDINATOR__STATE_DIR": str(folder / "state"),
        "COORDINATOR__ROOTS": str(folder),
        "COORDINATOR__PAGES": "true",
        "METRICS__LISTEN": "127.0.0.1:0",
        "LOG__AUDIT": str(folder / "audit.jsonl"),
        **{f"TLS__{key.upper()}": getattr(tls, key) for key in ("ca", "certificate", "key")},
        "TLS__REVOKED": tls.revoked,
    }
    environ = os.environ | {f"RANKDUMPD_{name}": value for name, value in names.items()}
    command = [sys.executable, "-m", "rankdumpd", "coordinator"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)


@contextlib.contextmanager
def ended(process: subprocess.Popen[str]) -> Generator[None]:
    """Kill a process that a test has not ended."""
    try:
        yield
    finally:
        process.kill()


def read_addresses(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return the addresses of HTTP and of gRPC, from the log."""
    assert process.stderr is not None
    found: list[str] = []
    for line in process.stderr:
        found += re.findall(r"(?:metrics are served at|listening on) ([\d.:]+)", line)
        if len(found) == 2:
            return found[0], found[1]
    raise AssertionError(found)


def find_live_jobs(site: HttpsReader, reader: TlsCredentials) -> set[str]:
    live = json.loads(site.get("/live.json", reader)[2])
    return {each["job_id"] for each in live["sessions"]}


def test_coordinator_shows_the_trees_of_its_jobs(tmp_path: Path):
    """An agent names a tree, and those who may read the status read its pages."""
    authority = CertificateAuthority(tmp_path / "ca")
    tls, tree = authority.server(), fill_tree(tmp_path / "dump" / "tree")
    reader, rank = authority.issue("r", "reader"), authority.issue("k", "rank")
    job = ReportedJob(JOB, str(tree), 1)
    with start_coordinator(tmp_path, tls) as process, ended(process):
        pages, calls = read_addresses(process)
        site = HttpsReader(pages, tls)
        # No job has reported yet.
        assert site.get("/", reader)[0] == 307
        assert find_live_jobs(site, reader) == set()
        with open_channel(calls, authority.issue("a", "agent")) as channel:
            agent = ReportingAgent("a1")
            agent.session(job.session(0), job.root)
            agent.session(ReportedJob("other", "/", 1).session(0), "/elsewhere")
            agent.connect(CoordinatorServiceStub(channel))
            wait_until(lambda: site.get("/", reader)[0] == 200)
            agent.close()
        status, headers, body = site.get("/overview.json", reader)
        assert (status, json.loads(body)["error"] if status != 200 else "") == (200, "")
        assert headers["content-security-policy"].startswith("default-src 'self'")
        assert str(tree).encode() in site.get("/", reader)[2]
        assert b"/elsewhere" not in site.get("/", reader)[2]
        wait_until(lambda: find_live_jobs(site, reader) == {JOB, "other"})
        assert b"/live/control" not in site.get("/live", reader)[2]
        assert (
            b"These pages may not control jobs" in site.get(f"/live/control?job={JOB}", reader)[2]
        )
        assert site.get("/health", rank)[::2] == (200, b"SERVING\n")
        assert b"rankdump_coordinator_jobs 2.0" in site.get("/metrics", reader)[2]
        for path in ("/", "/metrics", "/tensors", "/live", "/live/events"):
            assert site.get(path, rank)[0] == 403
        watching = site.open("/live/events", reader)
        while JOB.encode() not in watching.readline():
            pass
        authority.revoke("r")
        assert site.get("/tensors", reader)[0] == 403
        # Whoever watches does not delay the end.
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
        watching.close()
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    read = {
        (each["what"], each["who"], each["result"])
        for each in lines
        if each.get("method") == "GET / HTTP/1.1"
    }
    assert {("call", "r", "307"), ("call", "r", "200"), ("refused", "k", "role")} == read


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return fill_tree(tmp_path / "tree")


@pytest.fixture
def mounted(tree: Path) -> Iterator[tuple[PageProcess, HttpsReader]]:
    """Pages beside the metrics of this process, in the clear."""
    pages = PageProcess(lambda: [str(tree)], StatusView)
    endpoint = MetricsEndpoint("127.0.0.1:0", ProcessMetrics(()), TlsSettings(), pages=pages)
    endpoint.start()
    yield pages, HttpsReader(endpoint.address)
    endpoint.stop()
    endpoint.stop()


def test_process_of_pages_is_restarted(mounted):
    """Metrics and health do not need it, and pages wait until it is there again."""
    pages, site = mounted
    assert site.get("/static/web.css")[0] == 404
    wait_until(lambda: site.get("/tensors.json")[0] == 200)
    first = pages.pid
    os.kill(first, signal.SIGKILL)
    assert site.get("/metrics")[0] == 200
    assert site.get("/health")[0] == 200
    wait_until(lambda: pages.pid not in (None, first))
    wait_until(lambda: site.get("/")[0] == 200)
    status, headers, body = site.get("/tensor.json")
    assert (status, headers["content-type"]) == (400, "application/json")
    assert b"error" in body


def test_process_of_pages_ends_with_its_daemon(tree):
    """When that stops, and also when it is killed, which ends the pipe."""
    pages = PageProcess(lambda: [str(tree)], StatusView)
    pages.start()
    wait_until(lambda: pages.pid is not None)
    process = pages._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(PATIENCE_S) == 0
    wait_until(lambda: pages.pid not in (None, process.pid))
    second = pages.pid
    pages.stop()
    pages.stop()
    assert not Path(f"/proc/{second}").exists()


def make_settings(tls: TlsSettings, listen: str = "127.0.0.1:0", **more: Any) -> DaemonSettings:
    own = CoordinatorSettings(pages=True, **more)
    return DaemonSettings(coordinator=own, tls=tls, metrics=MetricsSettings(listen))


def test_coordinator_without_the_extra_has_no_pages_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    tls = TlsSettings("/a", "/b", "/c")
    settings = make_settings(tls, state_dir=str(tmp_path))
    process = _DaemonProcess(settings, lambda environ: settings)
    parts = (process.build_coordinator(),)
    assert isinstance(process._build_pages(parts), PageProcess)
    assert process._build_pages(()) is None
    find = importlib.util.find_spec
    monkeypatch.setattr(
        composition.importlib.util,
        "find_spec",
        lambda name: None if name == "jinja2" else find(name),
    )
    assert process._build_pages(parts) is None
    (line,) = caplog.messages
    assert line.startswith("module jinja2 is missing, so 127.0.0.1:0 has no pages")


def test_pages_need_certificates_and_an_address():
    """Without certificates every user of the host could read tensors."""
    for given in ({}, {"RANKDUMPD_METRICS__LISTEN": "127.0.0.1:1"}):
        with pytest.raises(ConfigError, match=r"coordinator\.pages.*pages show tensors"):
            load_settings(None, {"RANKDUMPD_COORDINATOR__PAGES": "true", **given})


def test_request_for_the_process_has_chosen_headers_alone():
    scope = {
        "type": "http",
        "raw_path": b"/a%20b",
        "query_string": b"rank=1",
        "headers": [(b"accept", b"text/html"), (b"cookie", b"secret"), (b"hx-request", b"true")],
    }
    wanted = b"GET /a%20b?rank=1 HTTP/1.0\r\naccept: text/html\r\nhx-request: true\r\n\r\n"
    assert make_request(scope) == wanted


def test_head_of_an_answer_is_read():
    head = b"HTTP/1.1 404 Not Found\r\nContent-Type: a/b\r\nConnection: close\r\nDate: x\r\n\r\n"
    assert parse_head(head) == (404, [(b"content-type", b"a/b")])
    for wrong in (b"\r\n\r\n", b"HTTP/1.1 x\r\n\r\n"):
        with pytest.raises((ValueError, IndexError)):
            parse_head(wrong)
