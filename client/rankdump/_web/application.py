"""The pages as an ASGI application: routes, answers as HTML and JSON, and errors as pages with one
line.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from rankdump._web.black_box_page import make_black_box_page
from rankdump._web.comparison_process import ComparisonProcesses
from rankdump._web.diff_page import format_mapping_file, make_diff_page
from rankdump._web.dump_source import DumpSource
from rankdump._web.html_templates import get_environment
from rankdump._web.job_source import JobSource
from rankdump._web.live_pages import LIVE_PATH, ORDER_PATH, LivePages
from rankdump._web.module_page import MODULES
from rankdump._web.order_page import ORDER, make_trace, parse_trace
from rankdump._web.overview_page import OVERVIEW
from rankdump._web.page_kinds import (
    KEPT_PARAMETERS,
    AbsentPageError,
    PageKind,
    PageParameters,
    ParameterError,
    TreeChoice,
    list_choices,
    make_body,
    parse_choice,
    wants_json,
)
from rankdump._web.query_page import make_query_page
from rankdump._web.query_process import QueryProcess
from rankdump._web.rank_map import draw_rank_map, make_rank_map_page
from rankdump._web.tensor_list import TENSOR_LIST
from rankdump._web.tensor_page import (
    TENSOR,
    draw_slice,
    find_row,
    make_npy,
    name_tensor,
    parse_tensor,
)
from rankdump.errors import (
    ConfigError,
    ForbiddenError,
    QueryError,
    RankdumpError,
    RejectedError,
    RetryableError,
    UnsupportedError,
)

_STATIC = Path(__file__).parent / "static"
_Request = TypeVar("_Request")
_logger = logging.getLogger(__name__)
_LISTED_PATHS = ("/", "/tensors", "/modules", "/ranks", "/order", "/diff", "/blackbox", "/query")
"""Paths of the pages that every page links to in its header."""


class WebPages:
    """Answers requests for the pages of several trees, and of a running job if one is given."""

    def __init__(
        self,
        sources: Sequence[DumpSource],
        queries: QueryProcess,
        comparisons: ComparisonProcesses,
        job: JobSource | None = None,
    ) -> None:
        """Trees may be added to `sources` later; the numbers of trees do not change."""
        self._sources = sources
        self._environment = get_environment()
        self.live = (
            LivePages(job, self._environment, self._present, self._answer_safely, sources)
            if job
            else None
        )
        self._rank_map = make_rank_map_page(sources)
        self._diff = make_diff_page(sources, comparisons.look)
        self.kinds: tuple[PageKind[Any], ...] = (
            *(OVERVIEW, TENSOR_LIST, TENSOR, MODULES, self._rank_map, ORDER, self._diff),
            *(make_black_box_page(sources), make_query_page(queries.run)),
        )

    @property
    def writing_paths(self) -> frozenset[str]:
        """Paths that accept the method POST."""
        return frozenset({ORDER_PATH} if self.live else ())

    def make_application(self) -> Starlette:
        """Return the application, without the gate that controls access."""
        routes: list[Route | Mount] = list(self.live.make_routes()) if self.live else []
        routes += [
            Route(path, partial(self._answer_safely, partial(self._answer_page, kind)))
            for kind in self.kinds
            for path in (kind.path, kind.json_path)
        ]
        files: tuple[tuple[str, Callable[[Request], Response]], ...] = (
            ("/ranks/map.png", self._answer_rank_map),
            ("/tensor/slice.png", self._answer_slice),
            ("/tensor/elements.npy", self._answer_npy),
            ("/order/trace.json", self._answer_trace),
            ("/diff/mapping.json", self._answer_mapping),
        )
        routes += [Route(path, partial(self._answer_safely, answer)) for path, answer in files]
        routes.append(Mount("/static", StaticFiles(directory=_STATIC)))
        return Starlette(
            routes=routes,
            middleware=[Middleware(AddressCheck)],
            exception_handlers={HTTPException: self._answer_unknown},
        )

    def close(self) -> None:
        """End all event streams; must be called on the event loop that serves them."""
        if self.live:
            self.live.feed.closed.set()

    def _answer_page(self, kind: PageKind[Any], request: Request) -> Response:
        if request.scope["path"] == "/" and self.live is not None and not self._sources:
            return RedirectResponse(LIVE_PATH)
        choice, source, asked = self._read_request(request, kind.parse)
        page = kind.build(source, asked)
        status = 400 if getattr(page, "error", "") else 200
        if wants_json(request):
            return JSONResponse(make_body(page), status)
        is_part = bool(kind.fragment) and request.headers.get("hx-request") == "true"
        template = kind.fragment if is_part else kind.template
        attempts = list_choices(choice, source) if kind.has_attempts else ()
        return self._render(
            request, template, choice, status, title=kind.title, page=page, attempts=attempts
        )

    def _present(self, request: Request, template: str, title: str, page: Any) -> Response:
        """Return the answer for a page that does not show a tree."""
        if wants_json(request):
            return JSONResponse(make_body(page))
        tree = PageParameters(request.query_params).read_number("tree") or 0
        choice = TreeChoice(tree if tree < len(self._sources) else 0)
        return self._render(request, template, choice, 200, title=title, page=page)

    def _answer_rank_map(self, request: Request) -> Response:
        _, source, asked = self._read_request(request, self._rank_map.parse)
        drawn = draw_rank_map(source, asked, self._sources)
        return Response(drawn, media_type="image/png")

    def _answer_slice(self, request: Request) -> Response:
        _, source, asked = self._read_request(request, parse_tensor)
        drawn = draw_slice(source, find_row(source, asked), asked.choice)
        return Response(drawn, media_type="image/png")

    def _answer_npy(self, request: Request) -> Response:
        _, source, asked = self._read_request(request, parse_tensor)
        row = find_row(source, asked)
        body = make_npy(source, row, is_joined=asked.choice.is_joined)
        return _make_download(body, f"{name_tensor(row)}.npy", "application/octet-stream")

    def _answer_trace(self, request: Request) -> Response:
        _, source, asked = self._read_request(request, parse_trace)
        made = make_trace(source, asked)
        if made.path is not None:
            return FileResponse(made.path, filename=made.name, media_type="application/json")
        return _make_download(made.body, made.name, "application/json")

    def _answer_mapping(self, request: Request) -> Response:
        _, _, asked = self._read_request(request, self._diff.parse)
        return _make_download(format_mapping_file(asked.pairs), "mapping.json", "application/json")

    def _read_request(
        self, request: Request, parse: Callable[[PageParameters], _Request]
    ) -> tuple[TreeChoice, DumpSource, _Request]:
        """Return the tree that the address of a request names, and the parsed parameters."""
        parameters = PageParameters(request.query_params)
        choice, source = self._choose_source(parameters)
        asked = parse(parameters)
        parameters.finish()
        return choice, source, asked

    def _choose_source(self, parameters: PageParameters) -> tuple[TreeChoice, DumpSource]:
        if not self._sources:
            raise AbsentPageError(
                "there is no tree yet: it comes when its job begins, or is named to rankdump web"
            )
        return parse_choice(parameters, self._sources)

    def _answer_safely(self, answer: Callable[[Request], Response], request: Request) -> Response:
        """Return the answer of `answer`; if it raises an error of rankdump, a page with
        one line.
        """
        try:
            return answer(request)
        except RankdumpError as error:
            return self._answer_error(request, find_status(error), str(error))
        except OSError as error:
            return self._answer_error(request, 500, f"cannot be read: {error}")
        except Exception:
            _logger.exception("page %s", request.scope["path"])
            text = "this page failed; the terminal of rankdump web has the reason"
            return self._answer_error(request, 500, text)

    def _answer_unknown(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        known = ", ".join((*_LISTED_PATHS, *((LIVE_PATH,) if self.live else ())))
        text = f"no page {request.scope['path'][:100]!r}; there are {known}"
        return self._answer_error(request, status, text)

    def _answer_error(self, request: Request, status: int, text: str) -> Response:
        line = " ".join(text.split())
        if wants_json(request):
            return JSONResponse({"error": line}, status)
        choice = TreeChoice()
        return self._render(request, "error.html", choice, status, title="Error", text=line)

    def _render(
        self, request: Request, template: str, tree: TreeChoice, status: int, **values: Any
    ) -> Response:
        asked = request.query_params
        html = self._environment.get_template(template).render(
            tree=tree,
            trees=[str(source.root) for source in self._sources],
            path=request.scope["path"],
            twin=_make_twin_address(request),
            listed=[
                kind
                for kind in self.kinds
                if kind.path in _LISTED_PATHS and (self._sources or not self.live)
            ],
            live=self.live,
            kept={name: asked[name] for name in KEPT_PARAMETERS if name in asked},
            **{"attempts": (), **values},
        )
        return HTMLResponse(html, status)


def find_status(error: RankdumpError) -> int:
    """Return the HTTP status code for an error of a reader."""
    if isinstance(error, AbsentPageError):
        return 404
    if isinstance(error, ParameterError | QueryError | ConfigError):
        return 400
    if isinstance(error, RejectedError):
        return 403 if isinstance(error, ForbiddenError) else 409
    if isinstance(error, RetryableError):
        return 503
    return 415 if isinstance(error, UnsupportedError) else 422


def _make_download(body: bytes, name: str, media_type: str) -> Response:
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return Response(body, media_type=media_type, headers=headers)


def _make_twin_address(request: Request) -> str:
    """Return the address of the same page as JSON; empty for an answer to a form."""
    if request.method != "GET":
        return ""
    path = request.scope["path"]
    query = f"?{request.url.query}" if request.url.query else ""
    return f"{'/overview' if path == '/' else path}.json{query}"


class AddressCheck:
    """Forwards requests whose query is ASCII, and answers others with one line."""

    def __init__(self, app: ASGIApp) -> None:
        self._inner = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request or forward it."""
        query: bytes = scope.get("query_string", b"")
        if query.isascii():
            await self._inner(scope, receive, send)
            return
        text = f"query {query[:60]!r} is not allowed; allowed: ASCII, other characters as %C3%A9"
        await PlainTextResponse(f"rankdump: {text}\n", 400)(scope, receive, send)
