"""TLS between agents, coordinators, ranks and users: admission, rejection and messages."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import html
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import grpc
import numpy as np
import pytest
from click.testing import CliRunner, Result
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from starlette.testclient import TestClient
from support.certificate_authority import LONG_AGO, CertificateAuthority, variables
from support.slab_agents import wait_until

import rankdump
from rankdump._cli import daemon_client
from rankdump._cli.command_group import run_command_line
from rankdump._cli.job_connection import JobConnection
from rankdump._core.certificate_files import RevokedCertificates, compute_fingerprint
from rankdump._core.job_control import ControlAnswer
from rankdump._core.plan import DumpPlan, OutputSettings, plan_to_json
from rankdump._core.status import SessionState, SessionStatus
from rankdump._web.application import WebPages
from rankdump._web.comparison_process import ComparisonProcesses
from rankdump._web.query_process import QueryProcess
from rankdump._wire.channel import TlsCredentials, open_channel
from rankdump.errors import ConfigError, ForbiddenError, UnavailableError
from rankdump.wire.v1 import agent_pb2, agent_pb2_grpc, coordinator_pb2, coordinator_pb2_grpc
from rankdumpd.agent.service import DumpAgent
from rankdumpd.coordinator.fleet_views import AgentReport
from rankdumpd.coordinator.service.coordinator import JobCoordinator
from rankdumpd.main import main as daemon_commands
from rankdumpd.server.audit_log import AuditLog
from rankdumpd.server.call_gate import CallGate
from rankdumpd.server.grpc_server import GrpcServer, GrpcService
from rankdumpd.server.tls import ServerCertificates
from rankdumpd.settings import AgentSettings, CoordinatorSettings, TlsSettings

WAIT_S = 300
ANYWHERE = "127.0.0.1:0"
ARRAY = np.arange(6, dtype=np.float32)
IN_A_YEAR = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=365)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    """An authority with a certificate of each role, and certificates that must be rejected."""
    made = CertificateAuthority(tmp_path_factory.mktemp("tls") / "ca")
    for role in ("agent", "operator", "reader", "rank"):
        made.issue(role, role)
    made.issue("nobody", hosts=("localhost",))
    made.issue_expired("expired", "operator")
    return made


class TlsService:
    """A service behind TLS and access control, in this process."""

    def __init__(self, folder: Path, settings: TlsSettings, *services: GrpcService) -> None:
        self.settings, self.services = settings, services
        self.audit = folder / "audit.jsonl"
        self._written = AuditLog(self.audit)
        certificates = ServerCertificates(settings, self._written.add_reload)
        revoked = RevokedCertificates(Path(settings.revoked), self._written.add_reload)
        self.gate = CallGate(certificates=certificates, revoked=revoked, audit=self._written)
        self._server = GrpcServer(ANYWHERE, services, tls=certificates, gate=self.gate)
        self.address = self._server.start()

    def stop(self) -> None:
        self._server.stop(0)
        self._written.close()

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.audit.read_text().splitlines()]


@pytest.fixture
def running(authority: CertificateAuthority, tmp_path: Path) -> Iterator[TlsService]:
    """An agent and a coordinator that listen on TCP, with a certificate each."""
    agent = DumpAgent(
        AgentSettings(listen=ANYWHERE, state_dir=str(tmp_path / "a"), encode_threads=1)
    )
    coordinator = JobCoordinator(CoordinatorSettings(state_dir=str(tmp_path / "c")))
    with contextlib.ExitStack() as stack:
        for room in (coordinator, agent):
            room.start()
            stack.callback(room.stop)
        # A list of its own, as tests revoke.
        revoked = tmp_path / "revoked"
        revoked.write_text("")
        name = f"server-{tmp_path.name}"
        settings = dataclasses.replace(authority.server(name), revoked=str(revoked))
        served = TlsService(tmp_path, settings, agent, coordinator)
        stack.callback(served.stop)
        yield served


@pytest.fixture
def shows(monkeypatch: pytest.MonkeyPatch):
    """Let the commands of this process present a certificate."""

    def show(credentials: TlsCredentials) -> None:
        for name, path in variables(credentials).items():
            monkeypatch.setenv(name, path)

    return show


def request(tree: Path, **more) -> agent_pb2.OpenSessionRequest:
    plan = plan_to_json(DumpPlan(OutputSettings(root=str(tree))))
    return agent_pb2.OpenSessionRequest(
        job_id="job", session_id="s1", world_size=1, plan_json=plan, **more
    )


def dump(address: str, tree: Path, credentials: TlsCredentials) -> None:
    """Dump one tensor in one iteration as a rank does."""
    plan = DumpPlan(OutputSettings(root=str(tree), codec="none"))
    with rankdump.Session(plan, agent=address, environ=variables(credentials)) as session:
        session.step(0)
        session.dump("Add", "Default/Add-op1", "output", 0, ARRAY)


def test_rank_dumps_over_tls(authority: CertificateAuthority, running: TlsService, tmp_path: Path):
    """With certificates on both sides everything works as on a socket."""
    dump(running.address, tmp_path / "tree", authority.credentials("rank"))
    (found,) = (tmp_path / "tree").rglob("*.npy")
    assert np.array_equal(np.load(found), ARRAY)


CALLS = {
    "agent status": lambda address: daemon_client.fetch_agent_status(address),
    "job status": lambda address: daemon_client.fetch_job_status(address),
    "drain": lambda address: daemon_client.drain_agent(address, timeout_s=1),
    "hints": lambda address: daemon_client.fetch_timeout_hints(address),
}


@pytest.mark.parametrize(
    ("role", "allowed"),
    [
        ("operator", set(CALLS)),
        ("reader", set(CALLS) - {"drain"}),
        ("agent", set[str]()),
        ("rank", set[str]()),
        ("nobody", set[str]()),
    ],
)
def test_role_permits_its_calls_and_no_others(
    authority: CertificateAuthority, running: TlsService, shows, role, allowed
):
    """Every call of users is answered for its roles, and rejected for others."""
    shows(authority.credentials(role))
    done = set[str]()
    for name, call in CALLS.items():
        with contextlib.suppress(ForbiddenError):
            call(running.address)
            done.add(name)
    assert done == allowed


def test_wrong_role_is_reported_in_one_line(
    authority: CertificateAuthority, running: TlsService, shows, capsys
):
    """The line has the certificate, the call, and the roles that may make it; the exit
    code is 1.
    """
    shows(authority.credentials("rank"))
    assert run_command_line(["status", "--agent", running.address]) == 1
    said = capsys.readouterr().err
    assert said == (
        f"rankdump: agent at {running.address}: the certificate of 'rank' has the wrong role: "
        "AgentService/Status is for operator or reader, and its roles are: rank\n"
    )


def test_live_page_controls_with_the_role_of_its_server(
    authority: CertificateAuthority, running: TlsService, shows, tmp_path: Path
):
    """A reader sees the job and no button, and the daemon refuses an order all the same."""
    dump(running.address, tmp_path / "tree", authority.credentials("rank"))
    for role, has_buttons, status, line in (
        ("reader", False, 403, "the certificate of 'reader' has the wrong role"),
        ("operator", True, 409, "has not reported"),
    ):
        shows(authority.credentials(role))
        source = JobConnection(running.address)
        (job_id,) = {each.job_id for each in source.read_status().sessions}
        assert bool(source.list_actions()) == has_buttons
        pages = WebPages((), QueryProcess(), ComparisonProcesses(), source)
        browser = TestClient(pages.make_application())
        query = urlencode({"job": job_id, "action": "stop"})
        order = browser.get(f"/live/confirm.json?{query}").json()["order"]["id"]
        answer = browser.post("/live/order", content=f"order={order}")
        assert (answer.status_code, line in html.unescape(answer.text)) == (status, True)
        assert answer.text.count('role="alert"') == 1


def test_revoked_certificate_is_reported_as_such(
    authority: CertificateAuthority, running: TlsService, shows, capsys, tmp_path: Path, caplog
):
    """Commands report it in one line, a rank once; neither calls the server unreachable."""
    for name in ("operator", "rank"):
        digits = compute_fingerprint(Path(authority.credentials(name).certificate).read_bytes())
        with Path(running.settings.revoked).open("a") as listed:
            listed.write(f"{digits} # {name}\n")
    shows(authority.credentials("operator"))
    assert run_command_line(["status", "--agent", running.address]) == 1
    said = capsys.readouterr().err
    expected = f"rankdump: agent at {running.address}: the certificate of 'operator' is revoked\n"
    assert said == expected
    dump(running.address, tmp_path / "t", authority.credentials("rank"))
    told = [r for r in caplog.records if r.name == "rankdump" and "is revoked" in r.message]
    assert len(told) == 1


def test_server_without_tls_is_reported_as_such(
    authority: CertificateAuthority, tmp_path: Path, shows
):
    """The error says that the server answers without TLS."""
    server = GrpcServer(ANYWHERE, ())
    shows(authority.credentials("operator"))
    try:
        with pytest.raises(UnavailableError, match="it does not speak TLS, or is not rankdumpd"):
            daemon_client.fetch_agent_status(server.start())
    finally:
        server.stop(0)


def test_user_certificates_cannot_pose_as_ranks_or_agents(
    authority: CertificateAuthority, running: TlsService, tmp_path
):
    with open_channel(running.address, authority.credentials("operator")) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            agent_pb2_grpc.AgentServiceStub(channel).OpenSession(request(tmp_path), timeout=WAIT_S)
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        reports = coordinator_pb2_grpc.CoordinatorServiceStub(channel).Report(
            iter([coordinator_pb2.ReportRequest(agent_id="a")]), timeout=WAIT_S
        )
        with pytest.raises(grpc.RpcError) as caught:
            list(reports)
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("none", r"it may require certificates \(RANKDUMP_TLS_CA, "),
        ("expired", "the certificate .*expired.pem is not valid: certificate has expired"),
        ("other authority", "the certificate .* is not valid: unable to get local issuer"),
        ("server of another", "its certificate is not signed by an authority in .*ca.pem"),
        ("self-made", "it rejects the certificate .*rank.pem"),
        ("other host", "its certificate names another host"),
        ("server expired", ": its certificate has expired$"),
        ("server too early", ": its certificate is not valid yet$"),
        ("no file", "certificate file /nowhere: No such file or directory"),
    ],
)
def test_certificate_problem_is_one_line_at_the_client(
    authority: CertificateAuthority,
    running: TlsService,
    shows,
    tmp_path: Path,
    case: str,
    said: str,
):
    """Whatever is wrong with a certificate is one clear line at the client, with exit code 3."""
    ours = authority.credentials("operator")
    if case == "expired":
        shows(authority.credentials("expired"))
    elif case in ("other authority", "server of another", "self-made"):
        other = CertificateAuthority(tmp_path / "other").issue("rank", "operator")
        ca = {"other authority": ours.ca, "server of another": other.ca}.get(case)
        if ca is None:
            # Believes both sides itself: only the server can say no.
            both = tmp_path / "both.pem"
            both.write_bytes(Path(ours.ca).read_bytes() + Path(other.ca).read_bytes())
            ca = str(both)
        shows(dataclasses.replace(other, ca=ca))
    elif case in ("other host", "server expired", "server too early"):
        shows(ours)
        now = {"server too early": IN_A_YEAR, "server expired": LONG_AGO}.get(case)
        made = (
            authority.issue_expired(case.replace(" ", "-"), hosts=("127.0.0.1",), now=now)
            if now
            else authority.issue("elsewhere", hosts=("elsewhere",))
        )
        Path(running.settings.key).write_bytes(Path(made.key).read_bytes())
        Path(running.settings.certificate).write_bytes(Path(made.certificate).read_bytes())
    elif case == "no file":
        shows(dataclasses.replace(ours, key="/nowhere"))
    with pytest.raises(UnavailableError, match=said):
        daemon_client.fetch_agent_status(running.address)


def test_health_reads_certificates_from_environment(
    authority: CertificateAuthority, running: TlsService
):
    """As the commands of `rankdump` do; without them the error says which variables name them."""

    def health(**environ: str) -> Result:
        return CliRunner().invoke(daemon_commands, ["health", running.address], env=environ)

    done = health(**variables(authority.credentials("rank")))
    assert (done.exit_code, done.output) == (0, "")
    done = health(**variables(authority.credentials("expired")))
    assert done.exit_code == 1
    assert "expired.pem is not valid: certificate has expired" in done.stderr
    done = health()
    assert done.exit_code == 1
    assert "RANKDUMP_TLS_CA" in done.stderr


def test_missing_client_settings_are_named(authority: CertificateAuthority, monkeypatch, capsys):
    """The error names a missing variable, or a remote address that needs TLS; the exit
    code is 2.
    """
    monkeypatch.setenv("RANKDUMP_TLS_CA", authority.credentials("operator").ca)
    assert run_command_line(["status", "--agent", "127.0.0.1:1"]) == 2
    assert "RANKDUMP_TLS_CERT" in capsys.readouterr().err
    monkeypatch.delenv("RANKDUMP_TLS_CA")
    assert run_command_line(["status", "--agent", "node1:1"]) == 2
    assert (
        "an address of this host as long as there are no certificates (RANKDUMP_TLS_CA"
        in capsys.readouterr().err
    )


def test_rank_logs_the_connection_problem_once(
    authority: CertificateAuthority,
    running: TlsService,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    """Training continues, and its log has the cause once."""
    dump(running.address, tmp_path / "t", authority.credentials("expired"))
    told = [r.message for r in caplog.records if "certificate has expired" in r.message]
    assert len(told) == 1
    assert "training continues" in told[0]


def test_rank_with_the_wrong_role_logs_it_once(
    authority: CertificateAuthority,
    running: TlsService,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    dump(running.address, tmp_path / "t", authority.credentials("reader"))
    told = [r for r in caplog.records if r.name == "rankdump" and "is for rank" in r.message]
    assert len(told) == 1


def test_revoked_certificate_ends_its_open_streams(
    authority: CertificateAuthority,
    running: TlsService,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    """Open streams end, and later calls on the same connection are rejected."""
    rank = authority.credentials("rank")
    with open_channel(running.address, rank) as channel:
        stub = agent_pb2_grpc.AgentServiceStub(channel)
        token = stub.OpenSession(request(tmp_path / "t"), timeout=WAIT_S).token
        over = threading.Event()
        hello = agent_pb2.PushRequest(hello=agent_pb2.Hello(session_id="s1", token=token))
        answers = stub.Push(_first_and_then_nothing(hello, over), timeout=WAIT_S)
        wait_until(lambda: "begin" in running.audit.read_text())
        digits = compute_fingerprint(Path(rank.certificate).read_bytes())
        Path(running.settings.revoked).write_text(f"{digits} # rank\n")
        with pytest.raises(grpc.RpcError) as caught:
            list(answers)
        over.set()
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        (line,) = [text for text in caplog.messages if "is ended" in text]
        assert " of 'rank' (ipv4:127.0.0.1:" in line
        assert "CallerIdentity" not in line
        with pytest.raises(grpc.RpcError) as caught:
            stub.OpenSession(request(tmp_path / "t"), timeout=WAIT_S)
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert caught.value.details() == "the certificate of 'rank' is revoked"


def _first_and_then_nothing(
    message: agent_pb2.PushRequest, over: threading.Event
) -> Iterator[agent_pb2.PushRequest]:
    yield message
    over.wait(WAIT_S)


def test_renewed_certificate_is_used_by_the_next_connection(
    authority: CertificateAuthority, running: TlsService, shows
):
    """No restart is needed, and connections with the earlier one continue."""
    operator = authority.credentials("operator")
    host, port = running.address.rsplit(":", 1)
    with open_channel(running.address, operator) as channel:
        stub = agent_pb2_grpc.AgentServiceStub(channel)
        stub.Status(agent_pb2.AgentStatusRequest(), timeout=WAIT_S)
        renewed = authority.server(f"renewed-{port}")
        for old, new in (("key", "key"), ("certificate", "certificate")):
            content = Path(getattr(renewed, new)).read_bytes()
            Path(getattr(running.settings, old)).write_bytes(content)
        assert ssl.get_server_certificate((host, int(port)), timeout=WAIT_S).encode() == (
            Path(renewed.certificate).read_bytes()
        )
        stub.Status(agent_pb2.AgentStatusRequest(), timeout=WAIT_S)
    (reload,) = [line for line in running.lines() if line["what"] == "reload"]
    assert running.settings.certificate in str(reload["files"])
    shows(operator)
    daemon_client.fetch_agent_status(running.address)


def test_audit_log_records_callers_and_calls(
    authority: CertificateAuthority, running: TlsService, shows, tmp_path: Path
):
    """It has sessions, streams, reads, drains and refusals with their callers, and no token."""
    dump(running.address, tmp_path / "tree", authority.credentials("rank"))
    shows(authority.credentials("operator"))
    daemon_client.fetch_agent_status(running.address)
    daemon_client.drain_agent(running.address, timeout_s=1)
    shows(authority.credentials("reader"))
    daemon_client.fetch_job_status(running.address, job_id="")
    with pytest.raises(ForbiddenError):
        daemon_client.drain_agent(running.address, timeout_s=1)
    running.stop()
    found = [
        (e["what"], str(e["method"]).rpartition(".")[2], e["who"], e.get("result"))
        for e in running.lines()
    ]
    assert found == [
        ("call", "AgentService/OpenSession", "rank", "OK"),
        ("begin", "AgentService/Push", "rank", None),
        ("end", "AgentService/Push", "rank", "OK"),
        ("call", "AgentService/Status", "operator", "OK"),
        ("call", "AgentService/Control", "operator", "OK"),
        ("call", "CoordinatorService/Status", "reader", "OK"),
        ("refused", "AgentService/Control", "reader", "PERMISSION_DENIED"),
    ]
    opened, _, ended, _, drained = running.lines()[:5]
    assert (opened["rank"], opened["root"]) == (0, str(tmp_path / "tree"))
    assert opened["session"] == ended["session"]
    assert opened["roles"] == ["rank"]
    pem = Path(authority.credentials("rank").certificate).read_bytes()
    assert opened["fingerprint"] == compute_fingerprint(pem)
    assert re.fullmatch(r"ipv4:127\.0\.0\.1:\d+", str(opened["peer"]))
    assert drained["action"] == "drain"
    assert not any("token" in line or "secret" in line for line in running.lines())


def test_audit_log_has_who_controlled_which_job_and_what_became_of_it(
    authority: CertificateAuthority, running: TlsService, shows, capsys
):
    coordinator: Any = running.services[1]
    status = SessionStatus("job", "s0", 0, 2, 0, "h", 1, SessionState.OPEN)
    closed = dataclasses.replace(status, rank=1, session_id="s1", state=SessionState.CLOSED)
    coordinator.add_report(AgentReport("a", 1, sessions=(status, closed)))
    is_over = threading.Event()

    def answer_orders() -> None:
        while not is_over.wait(0.02):
            found = [
                ControlAnswer(each.id, each.iteration is not None, each.iteration or 5, 10**7)
                for each in coordinator.list_orders()
            ]
            signed = [dataclasses.replace(e, job_id="job", session_id="s0") for e in found]
            coordinator.add_report(AgentReport("a", 1, control_answers=tuple(signed)))

    answering = threading.Thread(target=answer_orders)
    answering.start()
    command = ("control", "job", "iterations", "5-8", "--coordinator", running.address)
    try:
        for role, code in (("operator", 1), ("reader", 1)):
            shows(authority.credentials(role))
            assert run_command_line(command) == code
        shows(authority.credentials("operator"))
        assert run_command_line(["control", "none", "stop", *command[-2:]]) == 1
    finally:
        is_over.set()
        answering.join()
    done = capsys.readouterr()
    assert done.out.splitlines() == [
        "job job: iterations 5-8 from iteration 7 on, rank 0",
        "rank 1: not changed: it has ended its session",
    ]
    refused, unknown = done.err.splitlines()
    assert refused == (
        f"rankdump: coordinator at {running.address}: the certificate of 'reader' has the wrong "
        "role: CoordinatorService/Control is for operator, and its roles are: reader"
    )
    assert unknown.endswith("job 'none' has not reported; known jobs: job")
    running.stop()
    names = ("what", "who", "roles", "action", "job", "iteration", "unchanged_ranks", "result")
    assert [[line.get(name) for name in names] for line in running.lines()] == [
        ["call", "operator", ["operator"], "iterations 5-8", "job", 7, [1], "OK"],
        ["refused", "reader", ["reader"], *[None] * 4, "PERMISSION_DENIED"],
        ["call", "operator", ["operator"], "stop", "none", None, None, "FAILED_PRECONDITION"],
    ]


def test_agent_reports_to_the_coordinator_over_tls(
    authority: CertificateAuthority, running: TlsService, tmp_path: Path, caplog
):
    """An agent without the role logs that, and loses nothing until it is admitted."""
    credentials = authority.credentials("reader")
    own = tmp_path / "own"
    own.mkdir()
    files = TlsCredentials(*(str(own / name) for name in ("ca", "certificate", "key")))
    _copy(credentials, files)
    settings = AgentSettings(
        listen=f"unix:{own}/a.sock",
        state_dir=str(own),
        coordinator=running.address,
        keep_free_ratio=0.0,
        keep_free_inodes_ratio=0.0,
    )
    agent = DumpAgent(settings, files)
    server = GrpcServer(settings.listen, (agent,))
    agent.start()
    try:
        with open_channel(server.start()) as channel:
            agent_pb2_grpc.AgentServiceStub(channel).OpenSession(request(tmp_path / "tree"))
        wait_until(lambda: running.audit.read_text().count('"refused"') > 2)
        told = [r for r in caplog.records if "Report is for agent" in r.message]
        assert sorted(r.name for r in told) == [
            "rankdumpd.agent.report.reporter",
            "rankdumpd.server.call_gate",
        ]
        _copy(authority.credentials("agent"), files)
        assert agent.drain(WAIT_S) == 0
        assert agent.view().findings == ()
    finally:
        server.stop(0)
        agent.stop()


def _copy(source: TlsCredentials, target: TlsCredentials) -> None:
    for name in ("ca", "certificate", "key"):
        Path(getattr(target, name)).write_bytes(Path(getattr(source, name)).read_bytes())


def test_workers_serve_redirected_ranks_over_tls(
    authority: CertificateAuthority, short_dir: Path, shows
):
    """Redirected ranks find the same certificate, and the supervisor reaches its workers."""
    notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notified.bind(f"{short_dir}/notify")
    notified.settimeout(WAIT_S)
    tls = authority.server("front")
    environ = {
        "RANKDUMPD_AGENT__LISTEN": "0.0.0.0:0",
        "RANKDUMPD_AGENT__STATE_DIR": f"{short_dir}/state",
        "RANKDUMPD_TLS__CA": tls.ca,
        "RANKDUMPD_TLS__CERTIFICATE": tls.certificate,
        "RANKDUMPD_TLS__KEY": tls.key,
        "RANKDUMPD_LOG__AUDIT": f"{short_dir}/audit",
        "NOTIFY_SOCKET": f"{short_dir}/notify",
    }
    log = short_dir / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "rankdumpd", "agent", "--workers", "2"],
            env={**os.environ, **environ},
            stdout=file,
            stderr=file,
            cwd=short_dir,
        )
    try:
        with notified:
            assert notified.recv(4096).split(b"\n")[0] == b"READY=1", log.read_text()
        ports = re.findall(
            r"INFO rankdumpd.server.lifecycle: listening on 0\.0\.0\.0:(\d+)", log.read_text()
        )
        address = f"localhost:{ports[-1]}"
        rank = authority.credentials("rank")
        dump(address, short_dir / "tree", rank)
        shows(authority.credentials("operator"))
        assert daemon_client.drain_agent(address, timeout_s=WAIT_S) == 0
        view = daemon_client.fetch_agent_status(address)
        assert [each.rank for each in view.sessions] == [0]
        assert view.findings == ()
        assert len(list((short_dir / "tree").rglob("*.npy"))) == 1
        asked = [json.loads(line) for line in Path(f"{short_dir}/audit").read_text().splitlines()]
        assert {str(line["who"]) for line in asked} == {"rank", "operator", "front"}
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0


def test_addresses_beyond_loopback_need_certificates(authority: CertificateAuthority):
    """The same address is accepted with certificates, and rejected without."""
    with pytest.raises(ConfigError, match=r"with certificates \(\[tls\]\)"):
        GrpcServer("0.0.0.0:0", ()).start()
    server = GrpcServer("0.0.0.0:0", (), tls=ServerCertificates(authority.server("everywhere")))
    assert server.start().startswith("0.0.0.0:")
    server.stop(0)


def test_health_and_reflection_are_open_to_every_role(
    authority: CertificateAuthority, running: TlsService
):
    """This holds for their streams, too; a certificate without any role is rejected."""
    with open_channel(running.address, authority.credentials("rank")) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        listing = reflection_pb2.ServerReflectionRequest(list_services="")
        reflected: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        (answered,) = reflected.ServerReflectionInfo(iter([listing]), timeout=WAIT_S)
        assert len(answered.list_services_response.service) == 4
    with open_channel(running.address, authority.credentials("nobody")) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.RpcError, match="its roles are: none"):
            health.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)


def test_socket_callers_are_audited_as_local(short_dir: Path, tmp_path: Path):
    """Callers on a socket may do everything, and the log has them as local."""
    agent = DumpAgent(AgentSettings(listen=f"unix:{short_dir}/a", state_dir=f"{short_dir}/state"))
    path = tmp_path / "audit"
    audit = AuditLog(path)
    server = GrpcServer(f"unix:{short_dir}/a", (agent,), gate=CallGate(audit=audit))
    agent.start()
    try:
        address = server.start()
        dump(address, short_dir / "tree", TlsCredentials())
        assert daemon_client.drain_agent(address, timeout_s=WAIT_S) == 0
    finally:
        server.stop(0)
        agent.stop()
        audit.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["what"], line["who"]) for line in lines] == [
        ("call", "local"),
        ("begin", "local"),
        ("end", "local"),
        ("call", "local"),
    ]


def test_audit_log_is_opened_once_per_process(make_daemon, tmp_path: Path):
    """Access control, metrics page and retention write through one file object."""
    path = tmp_path / "audit"
    daemon = make_daemon(RANKDUMPD_LOG__AUDIT=str(path), RANKDUMPD_METRICS__LISTEN=ANYWHERE)
    daemon_client.fetch_agent_status(daemon.address)
    wait_until(lambda: path.stat().st_size > 0)
    opened = 0
    for each in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
        # Others may be closed in this moment.
        with contextlib.suppress(FileNotFoundError):
            opened += each.readlink() == path
    assert opened == 1


def test_unusable_audit_file_ends_the_start(short_dir: Path):
    """The daemon ends with one line and exit code 2 before it listens."""
    environ = os.environ | {
        "RANKDUMPD_COORDINATOR__LISTEN": f"unix:{short_dir}/c",
        "RANKDUMPD_COORDINATOR__STATE_DIR": f"{short_dir}/state",
        "RANKDUMPD_LOG__AUDIT": f"{short_dir}/none/audit",
    }
    done = subprocess.run(
        [sys.executable, "-m", "rankdumpd", "coordinator"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 2
    assert " CRITICAL rankdumpd.main: environment: log.audit: " in done.stderr.splitlines()[-1]


def check_config(own: TlsSettings, coordinator: str, folder: Path) -> subprocess.CompletedProcess:
    """Run `rankdumpd agent --check-config`."""
    environ = {
        **os.environ,
        "RANKDUMPD_AGENT__COORDINATOR": coordinator,
        "RANKDUMPD_AGENT__LISTEN": f"unix:{folder}/a.sock",
        "RANKDUMPD_TLS__CA": own.ca,
        "RANKDUMPD_TLS__CERTIFICATE": own.certificate,
        "RANKDUMPD_TLS__KEY": own.key,
    }
    command = [sys.executable, "-m", "rankdumpd", "agent", "--check-config"]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environ, timeout=2 * WAIT_S
    )


def test_check_config_checks_certificates_and_calls_the_coordinator(
    authority: CertificateAuthority, running: TlsService, tmp_path: Path
):
    """Each problem is a line on stderr, with status 1; the settings are on standard output.

    A coordinator that does not answer is a warning, because it may start later.
    """

    def checked(name: str, coordinator: str) -> tuple[int, list[str]]:
        shown = authority.credentials(name)
        own = TlsSettings(shown.ca, shown.certificate, shown.key)
        done = check_config(own, coordinator, tmp_path)
        assert f'certificate = "{shown.certificate}"' in done.stdout
        return done.returncode, done.stderr.splitlines()

    assert checked("agent", running.address) == (0, [])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
    status, (line,) = checked("agent", nobody)
    assert status == 0
    assert line.startswith(f"rankdumpd: warning: the coordinator at {nobody} does not answer: ")
    status, lines = checked("reader", running.address)
    assert status == 1
    assert [line.partition("; ")[0] for line in lines] == [
        f"rankdumpd: certificate {authority.credentials('reader').certificate} has the roles: "
        "reader",
        f"rankdumpd: the coordinator at {running.address} refuses this agent: the certificate of "
        "'reader' has the wrong role: CoordinatorService/Clock is for agent, and its roles are: "
        "reader",
    ]
    status, lines = checked("expired", running.address)
    assert status == 1
    assert any("is not valid: certificate has expired" in line for line in lines)


def test_agent_with_mismatched_certificate_files_does_not_start(
    authority: CertificateAuthority, tmp_path: Path
):
    """It ends with one line and status 2 at once, not with the first report."""
    shown = authority.credentials("agent")
    own = TlsSettings(shown.ca, shown.certificate, authority.credentials("rank").key)
    done = check_config(own, "unix:/c.sock", tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "rank.key" in done.stderr
