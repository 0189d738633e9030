"""The gate in front of all pages: tokens, cookies, hosts, methods and headers."""

from __future__ import annotations

import re

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from rankdump._http.request_gate import SECURITY_HEADERS
from rankdump._web.web_server import TOKEN_LIFE_S, AccessGate, AccessTokens, is_own_host


class HandClock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def read(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def tokens(clock) -> AccessTokens:
    return AccessTokens(clock.now_s)


@pytest.fixture
def gate(tokens, clock) -> AccessGate:
    inner = Starlette(routes=[Route("/{path:path}", lambda request: PlainTextResponse("inside"))])
    return AccessGate(inner, tokens, clock.read)


@pytest.fixture
def writing_gate(tokens, clock) -> AccessGate:
    def answer(request: Request) -> PlainTextResponse:
        return PlainTextResponse("inside")

    inner = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])
    return AccessGate(inner, tokens, clock.read, writing_paths=frozenset({"/order"}))


def browse(gate: AccessGate) -> TestClient:
    return TestClient(gate, base_url="http://127.0.0.1:8000", follow_redirects=False)


def test_token_is_exchanged_for_a_cookie(gate, tokens):
    browser = browse(gate)
    answer = browser.get("/tensors", params={"token": tokens.token, "search": "a b"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/tensors?search=a+b")
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= {part.strip() for part in cookie.split(";")}
    assert tokens.token not in cookie
    assert browser.get("/").text == "inside"


def test_page_without_a_cookie_is_one_line(gate):
    answer = browse(gate).get("/")
    assert answer.status_code == 403
    assert re.fullmatch(r"rankdump: this browser has no access[^\n]*\n", answer.text)


def test_token_works_once(gate, tokens):
    assert browse(gate).get("/", params={"token": tokens.token}).status_code == 303
    again = browse(gate).get("/", params={"token": tokens.token})
    assert (again.status_code, "used already" in again.text) == (403, True)


def test_wrong_token_is_refused_and_leaves_the_right_one(gate, tokens):
    for wrong in ("", "x" * 10_000, tokens.token[:-1], "\N{SNOWMAN}"):
        answer = browse(gate).get("/", params={"token": wrong})
        assert (answer.status_code, "not that of the running server" in answer.text) == (403, True)
    assert browse(gate).get("/", params={"token": tokens.token}).status_code == 303


def test_token_expires_and_the_cookie_does_not(gate, tokens, clock):
    browser = browse(gate)
    clock.now_s += TOKEN_LIFE_S
    late = browser.get("/", params={"token": tokens.token})
    assert (late.status_code, "expired" in late.text) == (403, True)
    clock.now_s -= 1
    assert browser.get("/", params={"token": tokens.token}).status_code == 303
    clock.now_s += 10 * TOKEN_LIFE_S
    assert browser.get("/").status_code == 200


@pytest.mark.parametrize("cookie", ["", "wrong", "\xff"])
def test_another_cookie_is_refused(gate, tokens, cookie):
    browse(gate).get("/", params={"token": tokens.token})
    headers = [(b"cookie", f"{tokens.cookie_name}={cookie}".encode("latin-1"))]
    assert browse(gate).get("/", headers=headers).status_code == 403


def test_no_cookie_is_right_before_the_token_was_used(tokens):
    assert not tokens.admits("")


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("127.0.0.1:8000", True),
        ("localhost:1", True),
        ("localhost", True),
        ("[::1]:80", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("evil@127.0.0.1", False),
        ("127.0.0.1:x", False),
        ("127.0.0.1/x", False),
        ("[::1", False),
        ("", False),
    ],
)
def test_only_names_of_this_host_are_allowed(gate, tokens, host, is_own):
    """A name that someone points to 127.0.0.1 does not reach the pages."""
    assert is_own_host(host) == is_own
    answer = browse(gate).get("/", params={"token": tokens.token}, headers={"host": host})
    assert answer.status_code == (303 if is_own else 421)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"])
def test_only_get_is_allowed(gate, tokens, method):
    browser = browse(gate)
    browser.get("/", params={"token": tokens.token})
    answer = browser.request(method, "/")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://127.0.0.1:8000", "sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"origin": "http://127.0.0.1:8000"}, 200),
        ({}, 403),
        ({"origin": "null", "sec-fetch-site": "same-origin"}, 403),
        ({"origin": "http://127.0.0.1:8001"}, 403),
        ({"origin": "http://localhost:8000"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://evil.example", "sec-fetch-site": "same-origin"}, 403),
        ({"origin": "http://127.0.0.1:8000", "sec-fetch-site": "same-site"}, 403),
        ({"origin": "http://127.0.0.1:8000", "sec-fetch-site": "none"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
    ],
)
def test_form_is_taken_from_a_page_of_the_server_alone(writing_gate, tokens, headers, status):
    browser = browse(writing_gate)
    browser.get("/", params={"token": tokens.token})
    answer = browser.post("/order", headers=headers)
    assert answer.status_code == status, answer.text
    assert status == 200 or "not come from a page of this server" in answer.text


def test_form_needs_the_cookie_and_its_path(writing_gate, tokens):
    origin = {"origin": "http://127.0.0.1:8000"}
    assert browse(writing_gate).post("/order", headers=origin).status_code == 403
    browser = browse(writing_gate)
    browser.get("/", params={"token": tokens.token})
    for method, path in (("POST", "/"), ("POST", "/order/x"), ("PUT", "/order")):
        assert browser.request(method, path, headers=origin).status_code == 405


def test_all_answers_have_the_headers(gate, tokens):
    browser = browse(gate)
    answers = [browser.get("/"), browser.get("/", params={"token": tokens.token}), browser.get("/")]
    assert [each.status_code for each in answers] == [403, 303, 200]
    for answer in answers:
        assert {name: answer.headers[name] for name in SECURITY_HEADERS} == SECURITY_HEADERS
        assert answer.headers["cache-control"] == "no-store"
        assert not any(name.startswith("access-control") for name in answer.headers)
    policy = SECURITY_HEADERS["content-security-policy"]
    assert policy.startswith("default-src 'self'")
    assert "unsafe" not in policy


def test_web_sockets_are_closed(gate):
    with pytest.raises(WebSocketDisconnect) as closed, browse(gate).websocket_connect("/"):
        pass
    assert closed.value.code == 1008
