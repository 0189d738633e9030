"""The command: its address, its end, and the process for statements of people."""

from __future__ import annotations

import http.client
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest
from support.certificate_authority import CertificateAuthority, variables
from support.slab_agents import wait_until

from rankdump._cli.command_group import EXIT_UNAVAILABLE, EXIT_USAGE, run_command_line
from rankdump._web.query_process import QueryProcess
from rankdump._web.web_server import bind_socket, has_desktop
from rankdump.errors import CorruptedError, ExhaustedError, QueryError


@pytest.mark.process
def test_command_serves_until_it_is_interrupted(trees):
    """Also while a browser watches a job, here one that nobody serves."""
    command = [sys.executable, "-m", "rankdump", "web", str(trees["indexed"]), "--no-browser"]
    command += ["--job", "unix:/nowhere/a.sock"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as server:
        assert server.stdout is not None
        address = urlsplit(server.stdout.readline().strip())
        told = [server.stdout.readline() for _ in range(2)]
        assert address.hostname == "127.0.0.1"
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, server.pid) == min(own + 10, 19)
        connection = http.client.HTTPConnection("127.0.0.1", address.port)
        connection.request("GET", f"/?{address.query}")
        answer = connection.getresponse()
        answer.read()
        assert (answer.status, answer.headers["location"]) == (303, "/")
        assert "server" not in answer.headers
        cookie = answer.headers["set-cookie"].partition(";")[0]
        connection.request("GET", "/", headers={"cookie": cookie})
        assert b"first value that is not finite" in connection.getresponse().read()
        connection.request("GET", "/live/events", headers={"cookie": cookie})
        events = connection.getresponse()
        while b"no daemon answers at unix:/nowhere/a.sock" not in events.readline():
            pass
        server.send_signal(signal.SIGINT)
        rest = server.communicate()
        events.read()
        connection.close()
    assert rest == ("", "")
    assert f"ssh -L {address.port}:127.0.0.1:{address.port} " in told[1]
    assert server.returncode == 0


@pytest.mark.process
def test_tree_that_its_job_has_not_begun_follows(trees, tmp_path):
    """Pages may be opened before the job starts; without a job that is an error."""
    later = tmp_path / "later"
    command = [sys.executable, "-m", "rankdump", "web", str(later), "--no-browser"]
    command += ["--job", "unix:/nowhere/a.sock"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        said = server.stdout.readline()
        address = urlsplit(server.stdout.readline().strip())
        connection = http.client.HTTPConnection("127.0.0.1", address.port)

        def get(target: str, **headers: str) -> http.client.HTTPResponse:
            connection.request("GET", target, headers=headers)
            answer = connection.getresponse()
            answer.read()
            return answer

        cookie = get(f"/?{address.query}").headers["set-cookie"].partition(";")[0]
        first = get("/", cookie=cookie)
        later.symlink_to(trees["indexed"])
        second = get("/", cookie=cookie)
        connection.close()
        server.send_signal(signal.SIGINT)
        server.communicate()
    assert said == f"{later} is no dump yet: its pages are there once the job has begun it\n"
    assert (first.status, first.headers["location"]) == (307, "/live")
    assert second.status == 200


def test_file_is_no_tree_of_a_job(tmp_path, capsys):
    path = tmp_path / "file"
    path.touch()
    command = ["web", str(path), "--job", "unix:/nowhere/a.sock", "--no-browser"]
    assert run_command_line(command) == EXIT_USAGE
    assert "is a file" in capsys.readouterr().err
    assert run_command_line(["web", str(tmp_path / "none"), "--no-browser"]) == EXIT_USAGE
    assert "'[TREE]...': Directory" in capsys.readouterr().err


def test_taken_port_is_one_line(trees, capsys):
    with bind_socket("127.0.0.1:0") as taken:
        port = taken.getsockname()[1]
        command = ["web", str(trees["walked"]), "--no-browser", "--port", str(port)]
        assert run_command_line(command) == EXIT_UNAVAILABLE
    assert f"127.0.0.1:{port}: cannot listen" in capsys.readouterr().err


def test_folder_that_is_no_tree_is_one_line(tmp_path, capsys):
    assert run_command_line(["web", str(tmp_path), "--no-browser"]) == 1
    assert "not a dump tree" in capsys.readouterr().err


def test_job_that_needs_certificates_is_one_line(capsys):
    assert run_command_line(["web", "--job", "node17:7421", "--no-browser"]) == EXIT_USAGE
    assert "'node17:7421' is not allowed; allowed: an address of this" in capsys.readouterr().err


def test_missing_extra_says_what_to_install(trees, capsys, monkeypatch):
    for name in ("rankdump._web.web_server", "rankdump._http.http_server"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert run_command_line(["web", str(trees["walked"])]) == EXIT_USAGE
    install = "install it with: pip install 'rankdump[web]'"
    assert capsys.readouterr().err == f"rankdump: module uvicorn is missing; {install}\n"


def test_browser_is_opened_on_a_desktop_alone():
    assert has_desktop({"DISPLAY": ":0"})
    assert has_desktop({"WAYLAND_DISPLAY": "wayland-0"})
    assert not has_desktop({"DISPLAY": "", "TERM": "xterm"})


@pytest.fixture
def query_process() -> Iterator[Callable[[float], QueryProcess]]:
    opened: list[QueryProcess] = []

    def open_process(timeout_s: float) -> QueryProcess:
        opened.append(QueryProcess(timeout_s=timeout_s, memory_bytes=64 << 20))
        return opened[-1]

    yield open_process
    for process in opened:
        process.close()


@pytest.mark.process
def test_statements_of_people_run_in_another_process(trees, query_process):
    """One that needs too much memory ends, with its process or alone, and the next one runs."""
    queries, root = query_process(60.0), trees["indexed"]
    found = queries.run(root, "SELECT max(rank) AS most, 'a' AS word FROM tensors")
    assert found == (("most", "word"), ((1, "a"),), 1)
    assert queries.run(root, "SELECT * FROM range(5000)").row_count == 5000
    with pytest.raises(QueryError, match="one SELECT"):
        queries.run(root, "DROP TABLE tensors")
    with pytest.raises((ExhaustedError, QueryError)):
        queries.run(root, "SELECT length(repeat('x', 8000000000)) AS n")
    assert queries.run(root, "SELECT 1 AS one").rows == ((1,),)


@pytest.mark.process
def test_statement_that_is_late_ends_and_the_next_one_runs(trees, query_process):
    queries, root = query_process(1.0), trees["indexed"]
    with pytest.raises(QueryError, match="longer than 1 s"):
        queries.run(root, "SELECT count(*) FROM range(1000000000000) a, range(1000) b")

    def is_answered() -> bool:
        # On a busy machine the start of the next process alone may take longer than the limit.
        try:
            return queries.run(root, "SELECT 1 AS one").rows == ((1,),)
        except QueryError:
            return False

    wait_until(is_answered)


def test_tree_that_is_gone_is_told(tmp_path, open_pages):
    with pytest.raises(CorruptedError, match="no such folder"):
        open_pages(tmp_path / "nothing")


def test_other_address_needs_certificates(trees, capsys, monkeypatch):
    """One line says what is missing, before anything listens."""
    tree = str(trees["walked"])
    for listen in ("0.0.0.0:0", "example.org:1"):
        assert run_command_line(["web", tree, "--listen", listen]) == EXIT_USAGE
        assert "on loopback, or any HOST:PORT with certificates" in capsys.readouterr().err
    monkeypatch.setenv("RANKDUMP_TLS_CA", "/nothing/ca.pem")
    assert run_command_line(["web", tree, "--listen", "0.0.0.0:0"]) == EXIT_USAGE
    assert "RANKDUMP_TLS_CERT" in capsys.readouterr().err
    monkeypatch.setenv("RANKDUMP_TLS_CERT", "/nothing/own.pem")
    monkeypatch.setenv("RANKDUMP_TLS_KEY", "/nothing/own.key")
    assert run_command_line(["web", tree, "--listen", "0.0.0.0:0"]) == EXIT_USAGE
    assert "/nothing/ca.pem" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--listen", "127.0.0.1"], "HOST:PORT"),
        (["--listen", "127.0.0.1:0", "--port", "1"], "leave --port out"),
        (["--listen", "127.0.0.1:0", "--revoked", "r"], "--revoked needs certificates"),
        (["--revoked", "r"], "--revoked needs --listen"),
    ],
)
def test_options_that_do_not_fit_are_one_line(trees, capsys, options, text):
    assert run_command_line(["web", str(trees["walked"]), *options]) == EXIT_USAGE
    assert text in capsys.readouterr().err


@pytest.mark.process
def test_command_serves_certificates_with_a_role(trees, tmp_path):
    """Readers read; an order to a job is for operators, whatever the certificate of the server."""
    authority = CertificateAuthority(tmp_path / "ca")
    own = authority.issue("own", "operator", hosts=("127.0.0.1",))
    callers = {role: authority.issue(role, role) for role in ("reader", "operator", "rank")}
    callers["gone"] = authority.issue("gone", "operator")
    authority.revoke("gone")
    command = [sys.executable, "-m", "rankdump", "web", str(trees["indexed"]), "--no-browser"]
    command += ["--listen", "127.0.0.1:0", "--revoked", str(authority.store.revoked)]
    command += ["--job", "unix:/nowhere/a.sock"]
    environment = {**os.environ, **variables(own)}
    statuses: dict[str, list[int]] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        address = urlsplit(server.stdout.readline().strip())
        assert (address.scheme, address.query) == ("https", "")
        for name, shown in callers.items():
            context = ssl.create_default_context(cafile=shown.ca)
            context.load_cert_chain(shown.certificate, shown.key)
            for method, path in (("GET", "/"), ("POST", "/live/order")):
                asking = http.client.HTTPSConnection("127.0.0.1", address.port, context=context)
                asking.request(method, path, headers={"sec-fetch-site": "same-origin"})
                answer = asking.getresponse()
                answer.read()
                asking.close()
                statuses.setdefault(name, []).append(answer.status)
                assert answer.headers["content-security-policy"].startswith("default-src 'self'")
        server.send_signal(signal.SIGTERM)
        server.communicate()
    assert server.returncode == 0
    # An operator's order is refused because no page has shown it.
    expected = {"reader": [200, 403], "operator": [200, 409], "rank": [403, 403]}
    assert statuses == {**expected, "gone": [403, 403]}
