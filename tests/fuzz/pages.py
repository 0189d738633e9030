"""Target for addresses of the pages of `rankdump web`: any query is a page, a file or one line, and
nothing of a file outside of the tree.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from collections.abc import MutableMapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fuzz.input_pieces import chosen
from starlette.types import ASGIApp
from support.web_trees import fill_tree

from rankdump._web.application import WebPages
from rankdump._web.comparison_process import (
    ComparisonProcesses,
    ComparisonRequest,
    ComparisonState,
    compare_request,
)
from rankdump._web.comparison_view import ComparisonView, RowSelection
from rankdump._web.dump_source import DumpSource
from rankdump._web.query_process import QueryAnswer, QueryProcess
from rankdump._web.web_server import AccessGate, AccessTokens
from rankdump.errors import QueryError, RankdumpError

PATHS = (
    *("/", "/tensors", "/tensor", "/modules", "/ranks", "/order", "/diff", "/blackbox", "/query"),
    *("/overview.json", "/tensors.json", "/tensor.json", "/modules.json", "/ranks.json"),
    *("/order.json", "/diff.json", "/blackbox.json", "/query.json"),
    *("/ranks/map.png", "/tensor/slice.png", "/tensor/elements.npy", "/order/trace.json"),
    *("/diff/mapping.json", "/static/app.js", "/nothing"),
)
"""New ones come last: an input names a path by its place."""
_OUTSIDE = "content of a file outside of the tree"
_ALERT = re.compile(r'role="alert">([^<]*)<')
_MAX_COMPARED = 64


class _RefusedQueries(QueryProcess):
    """Refuses each statement: those of people run in a process with limits of its own."""

    def run(self, root: Path, sql: str) -> QueryAnswer:
        raise QueryError(f"not run: {sql}")


class _OwnComparisons(ComparisonProcesses):
    """Compares in this process, each request once."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[ComparisonRequest, ComparisonView | str] = {}

    def look(self, request: ComparisonRequest, wanted: RowSelection) -> ComparisonState:
        if request not in self._known:
            if len(self._known) >= _MAX_COMPARED:
                return ComparisonState("waiting")
            try:
                self._known[request] = compare_request(request, [0, 0])
            except RankdumpError as error:
                self._known[request] = str(error)
        found = self._known[request]
        if isinstance(found, str):
            return ComparisonState("failed", failure=found)
        return ComparisonState("ready", summary=found.summarize(), excerpt=found.select(wanted))


class _OpenPages(NamedTuple):
    """Pages of two small trees, with the cookie of a browser that may ask."""

    application: ASGIApp
    cookie: str
    loop: asyncio.AbstractEventLoop
    folder: tempfile.TemporaryDirectory[str]


@cache
def _open_pages() -> _OpenPages:
    folder = tempfile.TemporaryDirectory(prefix="rankdump-fuzz-")
    roots = [fill_tree(Path(folder.name) / name, iterations=2) for name in ("a", "b")]
    (Path(folder.name) / "outside.json").write_text(_OUTSIDE)
    pages = WebPages([DumpSource(root) for root in roots], _RefusedQueries(), _OwnComparisons())
    tokens = AccessTokens(0.0)
    _, value = tokens.exchange(tokens.token, 0.0)
    gate = AccessGate(pages.make_application(), tokens, lambda: 0.0)
    cookie = f"{tokens.cookie_name}={value}"
    return _OpenPages(gate, cookie, asyncio.new_event_loop(), folder)


def pages(data: bytes) -> None:
    """The query of an address, behind the number of its path."""
    which, query = chosen(data, len(PATHS))
    status, kind, body = _ask(PATHS[which], query, is_part=bool(data) and data[0] >= 128)
    assert status in (200, 303) or 400 <= status < 500, status
    text = body.decode("utf-8", "replace")
    assert _OUTSIDE not in text
    assert "Traceback" not in text or b"Traceback" in query
    if status < 400:
        return
    if kind.startswith("application/json"):
        lines = [json.loads(text)["error"]]
    elif kind.startswith("text/html"):
        lines = _ALERT.findall(text)
    else:
        lines = [text.removesuffix("\n")]
    assert lines
    assert all(line.strip() and "\n" not in line.strip() for line in lines)


def _ask(path: str, query: bytes, *, is_part: bool) -> tuple[int, str, bytes]:
    """Return status, type and body of an answer."""
    held = _open_pages()
    headers = [(b"host", b"127.0.0.1"), (b"cookie", held.cookie.encode())]
    headers += [(b"hx-request", b"true")] if is_part else []
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 1),
    }
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        # A request without a body, from a client that stays; who waits for its end is cancelled.
        await held.loop.create_future()
        raise AssertionError("the client does not leave")

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def ask() -> None:
        await held.application(scope, receive, send)

    held.loop.run_until_complete(ask())
    named = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], named.get("content-type", ""), body
