"""The server: certificates, and clients that are late, slow, too many or send too much."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from support.certificate_authority import CertificateAuthority
from support.slab_agents import wait_until

from rankdump._core.caller_roles import CallerIdentity
from rankdump._http.http_server import HttpServer, bind_listener
from rankdump._http.request_gate import RoleGate, admit_local_caller
from rankdump._http.server_guard import HttpsGuard
from rankdump._wire.channel import TlsCredentials
from rankdump.errors import ConfigError
from rankdumpd.settings import TlsSettings

pytestmark = pytest.mark.process
BIG_BYTES = 32 << 20
LATE_S = 0.2
"""Time for a client, where a test waits for its end."""


class CountedRefusals:
    """Counts the reasons of refusals."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def count(self, reason: str) -> None:
        self.reasons.append(reason)

    def add(self, reason: str, caller: CallerIdentity, request: str, why: str) -> None:
        self.reasons.append(reason)


class HttpHost:
    """A server in a thread."""

    def __init__(
        self, tls: TlsSettings | None, *, timeout_s: float = 60.0, max_connections: int = 8
    ) -> None:
        self.refusals, self.tls = CountedRefusals(), tls
        self.left, self.held = threading.Event(), threading.Event()
        guard = make_guard(tls) if tls else None
        listening = bind_listener("127.0.0.1", 0)
        self.port = listening.getsockname()[1]
        self.server = HttpServer(
            RoleGate(
                self.answer, guard.explain_refusal if guard else admit_local_caller, self.refusals
            ),
            listening,
            refusals=self.refusals,
            guard=guard,
            max_connections=max_connections,
            threads=2,
            timeout_s=timeout_s,
        )
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with few bytes, with many, or begin an answer that does not end."""
        if scope["path"] == "/held":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"begun", "more_body": True})
            self.held.set()
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left.set()
            return
        size = BIG_BYTES if scope["path"] == "/big" else 3
        await PlainTextResponse(b"x" * size)(scope, receive, send)

    def connect(self, shown: TlsCredentials | None = None) -> socket.socket:
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        if self.tls is None:
            return plain
        context = ssl.create_default_context(cafile=self.tls.ca)
        if shown:
            context.load_cert_chain(shown.certificate, shown.key)
        return context.wrap_socket(plain, server_hostname="127.0.0.1")

    def get(self, shown: TlsCredentials | None = None, path: str = "/") -> tuple[int, str]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port)) as asking:
            asking.sock = self.connect(shown)
            asking.request("GET", path)
            answer = asking.getresponse()
            return answer.status, answer.read().decode()

    def close(self) -> None:
        self.server.request_stop()
        self.thread.join()


def make_guard(tls: TlsSettings) -> HttpsGuard:
    return HttpsGuard(ca=tls.ca, certificate=tls.certificate, key=tls.key, revoked=tls.revoked)


def read_all(connected: socket.socket) -> bytes:
    """Return what comes until the other side closes or resets the connection."""
    found = b""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while piece := connected.recv(1 << 16):
            found += piece
    return found


@pytest.fixture
def host_of() -> Iterator[Callable[..., HttpHost]]:
    with contextlib.ExitStack() as stack:

        def make(tls: TlsSettings | None = None, **more) -> HttpHost:
            host = HttpHost(tls, **more)
            stack.callback(host.close)
            return host

        yield make


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> CertificateAuthority:
    made = CertificateAuthority(tmp_path_factory.mktemp("http") / "ca")
    made.server()
    made.issue("reader", "reader")
    made.issue("gone", "reader")
    made.issue("nobody", hosts=("nobody",))
    return made


def server_of(authority: CertificateAuthority) -> TlsSettings:
    shown = authority.credentials("server")
    return TlsSettings(shown.ca, shown.certificate, shown.key, str(authority.store.revoked))


def test_certificates_and_roles_decide(authority, host_of, tmp_path):
    """None, one of another authority, one without a role, a revoked one, the right one."""
    host = host_of(server_of(authority))
    stranger = CertificateAuthority(tmp_path / "other").issue("reader", "reader")
    for shown in (None, stranger):
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.HTTPException)):
            host.get(shown)
    wait_until(lambda: host.refusals.reasons == ["certificate", "certificate"])
    assert host.get(authority.credentials("nobody"))[0] == 403
    assert host.get(authority.credentials("gone"))[0] == 200
    authority.revoke("gone")
    status, text = host.get(authority.credentials("gone"))
    assert (status, "is revoked" in text) == (403, True)
    assert host.get(authority.credentials("reader")) == (200, "xxx")
    assert host.refusals.reasons == ["certificate"] * 2 + ["role"] * 2


def test_open_connection_ends_when_its_certificate_is_revoked(authority, host_of):
    shown = authority.issue("leaver", "reader")
    host = host_of(server_of(authority))
    with host.connect(shown) as connected:
        connected.sendall(b"GET /held HTTP/1.1\r\nHost: a\r\n\r\n")
        assert host.held.wait(60)
        authority.revoke("leaver")
        assert b"begun" in read_all(connected)
    assert host.left.wait(60)


def test_plain_text_and_old_tls_are_refused(authority, host_of):
    host = host_of(server_of(authority))
    with socket.create_connection(("127.0.0.1", host.port), timeout=60) as connected:
        connected.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert b"HTTP" not in read_all(connected)
    context = make_guard(server_of(authority)).get_context()
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_changed_certificate_is_used_by_the_next_connection(authority, host_of, tmp_path):
    """Files that do not match each other leave the earlier ones in use."""
    first, other = authority.credentials("server"), authority.server("other")
    tls = TlsSettings(first.ca, *(str(tmp_path / name) for name in ("cert", "key")))
    for source, target in ((first.certificate, tls.certificate), (first.key, tls.key)):
        Path(target).write_bytes(Path(source).read_bytes())
    host, shown = host_of(tls), authority.credentials("reader")

    def name_server() -> str:
        with host.connect(shown) as connected:
            assert isinstance(connected, ssl.SSLSocket)
            found: Any = connected.getpeercert()
            return found["subject"][0][0][1]

    assert name_server() == "server"
    Path(tls.certificate).write_bytes(Path(other.certificate).read_bytes())
    assert name_server() == "server"
    Path(tls.key).write_bytes(Path(other.key).read_bytes())
    assert name_server() == "other"


def test_bad_files_are_one_line(authority, tmp_path):
    tls, text = server_of(authority), tmp_path / "text"
    text.write_text("no certificate")
    names = {"ca": tls.ca, "certificate": tls.certificate, "key": tls.key}
    for wrong, path in (("ca", text), ("key", text), ("certificate", tmp_path / "nothing")):
        with pytest.raises(ConfigError, match=str(path)):
            HttpsGuard(**{**names, wrong: str(path)})


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost:", b"GET / HT"])
def test_request_that_does_not_arrive_is_ended(host_of, sent):
    """Also one of which single bytes come: the time is for the whole request."""
    host = host_of(timeout_s=LATE_S)
    with host.connect() as connected:
        connected.sendall(sent)
        assert read_all(connected) == b""


def test_second_request_has_the_same_time(host_of):
    host = host_of(timeout_s=LATE_S)
    with host.connect() as connected:
        connected.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\nGET /")
        assert read_all(connected).endswith(b"xxx")


def test_handshake_that_does_not_come_is_ended(authority, host_of):
    host = host_of(server_of(authority), timeout_s=LATE_S)
    with socket.create_connection(("127.0.0.1", host.port), timeout=60) as connected:
        assert read_all(connected) == b""
    assert host.refusals.reasons == []


def test_answer_that_is_not_read_is_ended(host_of):
    host = host_of(timeout_s=LATE_S)
    with host.connect() as slow:
        slow.sendall(b"GET /big HTTP/1.1\r\nHost: a\r\n\r\n")
        wait_until(lambda: host.server._connections)
        # The server has given up, although nothing of it was read here.
        wait_until(lambda: not host.server._connections)
        assert len(read_all(slow)) < BIG_BYTES


def test_large_answer_arrives_as_a_whole(authority, host_of):
    host = host_of(server_of(authority))
    assert host.get(authority.credentials("reader"), "/big")[1] == "x" * BIG_BYTES


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * (1 << 17),
        b"GET /" + b"x" * (1 << 17),
        b"\x16\x03\x01\x00\xa5\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_too_large_and_malformed_heads_are_refused(host_of, head):
    host = host_of()
    with host.connect() as connected:
        with contextlib.suppress(ConnectionError):
            connected.sendall(head)
        assert read_all(connected).partition(b"\r\n")[0] in (b"HTTP/1.1 400 Bad Request", b"")
    wait_until(lambda: host.refusals.reasons == ["malformed"])


def test_connections_beyond_the_limit_are_closed_and_counted(host_of):
    host = host_of(max_connections=2)
    with host.connect(), host.connect():
        with host.connect() as third:
            assert read_all(third) == b""
        assert host.refusals.reasons == ["busy"]
    wait_until(lambda: not host.server._connections)
    assert host.get() == (200, "xxx")


def make_server() -> HttpServer:
    return HttpServer(
        PlainTextResponse("a"),
        bind_listener("127.0.0.1", 0),
        refusals=CountedRefusals(),
        max_connections=1,
        threads=1,
    )


def test_server_may_be_stopped_before_it_runs():
    server = make_server()
    server.request_stop()
    server.run()
    server.request_stop()


def test_signal_before_the_loop_runs_ends_the_server(monkeypatch):
    run, handler = asyncio.run, signal.getsignal(signal.SIGINT)

    def run_after_signal(serving: Coroutine[None, None, None]) -> None:
        signal.raise_signal(signal.SIGINT)
        run(serving)

    monkeypatch.setattr(asyncio, "run", run_after_signal)
    make_server().run(signals=(signal.SIGINT,))
    assert signal.getsignal(signal.SIGINT) is handler


def test_stop_ends_answers_that_do_not_end(host_of):
    host = host_of()
    with host.connect() as connected:
        connected.sendall(b"GET /held HTTP/1.1\r\nHost: a\r\n\r\n")
        assert host.held.wait(60)
        host.close()
        assert b"begun" in read_all(connected)
    assert asyncio.run(_is_idle())


async def _is_idle() -> bool:
    return len(asyncio.all_tasks()) == 1
