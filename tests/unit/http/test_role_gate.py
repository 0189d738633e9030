"""The gate by roles: methods, versions, roles, and requests that pages of other sites make."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from rankdump._core.caller_roles import CallerIdentity, explain_refusal
from rankdump._http.http_server import CALLER_KEY
from rankdump._http.request_gate import CONTROL_METHOD, READ_METHOD, SECURITY_HEADERS, RoleGate

HEALTH_METHOD = "/grpc.health.v1.Health/Check"


def explain(method: str, caller: CallerIdentity) -> str:
    """Compare roles, as a guard does with those of certificates."""
    return explain_refusal(method, caller, revoked=frozenset({"gone"}))


class NotedRefusals:
    """Keeps what was refused."""

    def __init__(self) -> None:
        self.added: list[tuple[str, str]] = []

    def count(self, reason: str) -> None:
        raise AssertionError(reason)

    def add(self, reason: str, caller: CallerIdentity, request: str, why: str) -> None:
        self.added.append((reason, request))


class GateRig:
    """A gate, and a browser with a certificate."""

    def __init__(self) -> None:
        self.refusals = NotedRefusals()
        methods = ["GET", "POST"]
        route = Route("/{path:path}", lambda request: PlainTextResponse("in"), methods=methods)
        writing = {"/order": CONTROL_METHOD}
        self.gate = RoleGate(
            Starlette(routes=[route]),
            explain,
            self.refusals,
            lambda path: HEALTH_METHOD if path == "/health" else READ_METHOD,
            writing=writing,
        )

    def browse(self, *roles: str, fingerprint: str = "f", version: str = "1.1") -> TestClient:
        caller = CallerIdentity("ann", frozenset(roles), fingerprint)

        async def present(scope: Scope, receive: Receive, send: Send) -> None:
            shown: ASGIApp = self.gate
            more = {CALLER_KEY: caller, "http_version": version}
            await shown({**scope, **more}, receive, send)

        return TestClient(present, base_url="https://host")


@pytest.fixture
def rig() -> GateRig:
    return GateRig()


@pytest.mark.parametrize(
    ("role", "status"), [("reader", 200), ("operator", 200), ("agent", 403), ("rank", 403)]
)
def test_pages_are_for_those_who_may_read_the_status(rig, role, status):
    answer = rig.browse(role).get("/tensors?rank=1")
    assert answer.status_code == status
    assert {name: answer.headers[name] for name in SECURITY_HEADERS} == SECURITY_HEADERS
    assert answer.headers["cache-control"] == "no-store"
    refused = [("role", "GET /tensors?rank=1 HTTP/1.1")]
    assert rig.refusals.added == (refused if status == 403 else [])


@pytest.mark.parametrize("host", ["host/health?", "host/health#"])
def test_host_of_a_request_does_not_decide_about_its_path(rig, host):
    """Health is for all roles, so a path that is read from the address would open every page."""
    assert rig.browse("rank").get("/health").status_code == 200
    assert rig.browse("rank").get("/tensors", headers={"host": host}).status_code == 403


def test_certificate_without_a_role_and_revoked_certificate_read_nothing(rig):
    assert "its roles are: none" in rig.browse().get("/").text
    assert "is revoked" in rig.browse("reader", fingerprint="gone").get("/").text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
def test_other_methods_are_refused(rig, method):
    answer = rig.browse("operator").request(method, "/")
    assert (answer.status_code, answer.headers["allow"]) == (501, "GET")
    assert rig.refusals.added == [("method", f"{method} / HTTP/1.1")]


@pytest.mark.parametrize(
    ("role", "headers", "status"),
    [
        ("operator", {"sec-fetch-site": "same-origin"}, 200),
        ("operator", {"origin": "https://host"}, 200),
        ("operator", {}, 403),
        ("operator", {"sec-fetch-site": "none"}, 403),
        ("operator", {"sec-fetch-site": "same-site", "origin": "https://host"}, 403),
        ("operator", {"origin": "https://evil.example"}, 403),
        ("reader", {"sec-fetch-site": "same-origin"}, 403),
        ("agent", {"sec-fetch-site": "same-origin"}, 403),
    ],
)
def test_forms_are_for_those_who_may_control_and_from_pages_of_the_server(
    rig, role, headers, status
):
    assert rig.browse(role).post("/order", headers=headers).status_code == status
    assert len(rig.refusals.added) == (status == 403)


def test_other_versions_of_http_are_refused(rig):
    assert rig.browse("reader", version="9.9").get("/").status_code == 505
    assert rig.refusals.added == [("malformed", "GET / HTTP/9.9")]


@pytest.mark.parametrize(
    ("site", "mode", "target", "status"),
    [
        ("none", "navigate", "document", 200),
        ("same-origin", "cors", "empty", 200),
        ("cross-site", "navigate", "document", 200),
        ("cross-site", "navigate", "iframe", 403),
        ("cross-site", "no-cors", "image", 403),
        ("same-site", "cors", "empty", 403),
    ],
)
def test_other_sites_may_link_and_nothing_else(rig, site, mode, target, status):
    """A browser presents its certificate also to requests that other sites make."""
    headers = {"sec-fetch-site": site, "sec-fetch-mode": mode, "sec-fetch-dest": target}
    assert rig.browse("reader").get("/", headers=headers).status_code == status


def test_web_sockets_are_closed(rig):
    with pytest.raises(WebSocketDisconnect) as closed, rig.browse().websocket_connect("/"):
        pass
    assert closed.value.code == 1008
