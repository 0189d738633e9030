"""Pages of a running job: its state, which is refreshed, and the steps of an order: what to change,
what that will do, and the result.

An order is stored here when its preview is shown, and the request to carry it out contains its id.
So exactly the confirmed order is carried out, and only once.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from jinja2 import Environment
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from rankdump._core.caller_roles import explain_refusal
from rankdump._core.job_control import ControlAction, ControlOrder
from rankdump._core.status import StatusView, view_as_json
from rankdump._http.request_gate import CONTROL_METHOD, get_caller
from rankdump._web.control_preview import OrderPreview, describe_plans, preview_order, select_job
from rankdump._web.dump_source import DumpSource, find_tree_number
from rankdump._web.job_source import ControlOutcome, EventStream, JobSource, LiveFeed, LiveState
from rankdump._web.live_view import LiveContent, make_live_content
from rankdump._web.page_kinds import PageParameters, ParameterError, make_body, wants_json
from rankdump.errors import ForbiddenError, RejectedError, UnavailableError

LIVE_PATH, EVENTS_PATH = "/live", "/live/events"
CONTROL_PATH, CONFIRM_PATH, ORDER_PATH = "/live/control", "/live/confirm", "/live/order"
_ORDER_LIFE_S = 600.0
"""Seconds in which an order can be confirmed, because the state that was shown with it changes."""
_MAX_ORDERS = 256
_MAX_BODY_BYTES = 4096
_ACTIONS = tuple(each.value for each in ControlAction)
_NO_ACTIONS = (
    "These pages may not control jobs: that needs rankdump control, or rankdump web --job, with a "
    "certificate of the role operator."
)


@dataclass(frozen=True, slots=True)
class LivePage:
    """Content of the page with the state of jobs."""

    content: LiveContent
    time_text: str
    actions: tuple[ControlAction, ...]
    trees: Mapping[str, int]
    """Numbers of those trees of the jobs that are served, too."""


@dataclass(frozen=True, slots=True)
class ControlPage:
    """Content of the page that shows what can be changed."""

    job_id: str
    actions: tuple[ControlAction, ...]
    refusal: str
    """Why nothing can be requested; empty if something can be."""
    plans: tuple[str, ...]
    """Sentences about what is dumped now."""


@dataclass(frozen=True, slots=True)
class ConfirmPage:
    """Content of the page that shows what an order will do."""

    order: ControlOrder
    preview: OrderPreview


@dataclass(frozen=True, slots=True)
class OutcomePage:
    """Content of the page that shows the result of an order."""

    order: ControlOrder
    outcome: ControlOutcome


PagePresenter = Callable[[Request, str, str, Any], Response]
"""Function that makes the answer for a page, as HTML or JSON, from request, template, title and
content.
"""


class OrderDesk:
    """Orders whose preview was shown, and the results of those that were confirmed."""

    def __init__(self, send: Callable[[ControlOrder], ControlOutcome]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._is_sending = threading.Lock()
        self._shown: OrderedDict[str, tuple[ControlOrder, float]] = OrderedDict()
        self._done: OrderedDict[str, OutcomePage] = OrderedDict()

    def offer(self, order: ControlOrder, now_s: float) -> None:
        """Store an order until it is confirmed."""
        with self._lock:
            self._shown[order.id] = (order, now_s)
            while len(self._shown) > _MAX_ORDERS:
                self._shown.popitem(last=False)

    def carry_out(self, order_id: str, now_s: float) -> OutcomePage:
        """Return the result of an order, which is sent now unless it was sent before.

        RejectedError for an order that was not shown, or too long ago, and while another order is
        being carried out.
        """
        with self._lock:
            if order_id in self._done:
                return self._done[order_id]
            order, shown_s = self._shown.get(order_id, (None, 0.0))
        if order is None or now_s - shown_s >= _ORDER_LIFE_S:
            raise RejectedError(
                "this request was not shown here in the last ten minutes: begin anew"
            )
        if not self._is_sending.acquire(blocking=False):
            raise RejectedError("another request is under way: repeat this one when it is done")
        try:
            page = OutcomePage(order, self._send(order))
        finally:
            self._is_sending.release()
        with self._lock:
            self._done[order_id] = page
            while len(self._done) > _MAX_ORDERS:
                self._done.popitem(last=False)
        return page


class LivePages:
    """Answers requests for the pages of a running job."""

    title = "Live"
    path = LIVE_PATH

    def __init__(
        self,
        source: JobSource,
        environment: Environment,
        present: PagePresenter,
        answer_safely: Callable[[Callable[[Request], Response], Request], Response],
        sources: Iterable[DumpSource],
    ) -> None:
        self._sources = sources
        self._source, self._present, self._answer_safely = source, present, answer_safely
        self._part = environment.get_template("live_part.html")
        self.feed = LiveFeed(source.read_status, self._render_part)
        self._desk = OrderDesk(source.send_control)

    @property
    def address(self) -> str:
        """Address of the daemon that the states come from."""
        return self._source.address

    def make_routes(self) -> list[Route]:
        """Return the routes of all pages."""
        pages = {
            LIVE_PATH: self._answer_live,
            CONTROL_PATH: self._answer_control,
            CONFIRM_PATH: self._answer_confirm,
        }
        routes = [
            Route(path + suffix, partial(self._answer_with_state, answer))
            for path, answer in pages.items()
            for suffix in ("", ".json")
        ]
        routes.append(Route(EVENTS_PATH, self._stream_events))
        routes.append(Route(ORDER_PATH, self._answer_order, methods=["POST"]))
        return routes

    async def _answer_with_state(
        self, answer: Callable[[LiveState, Request], Response], request: Request
    ) -> Response:
        state = await self.feed.get_fresh()
        return await run_in_threadpool(self._answer_safely, partial(answer, state), request)

    async def _stream_events(self, request: Request) -> ASGIApp:
        return EventStream(self.feed)

    def _answer_live(self, state: LiveState, request: Request) -> Response:
        parameters = PageParameters(request.query_params)
        parameters.read_number("tree")
        parameters.finish()
        if wants_json(request):
            return JSONResponse(make_body(view_as_json(_get_view(state))))
        return self._present(request, "live.html", self.title, self._make_page(state))

    def _render_part(self, state: LiveState) -> str:
        return self._part.render(page=self._make_page(state))

    def _make_page(self, state: LiveState) -> LivePage:
        content = make_live_content(state.view, state.problem)
        numbers = {root: find_tree_number(self._sources, Path(root)) for root in content.roots}
        trees = {root: number for root, number in numbers.items() if number is not None}
        return LivePage(content, state.time_text, self._source.list_actions(), trees)

    def _answer_control(self, state: LiveState, request: Request) -> Response:
        parameters = PageParameters(request.query_params)
        job_id = parameters.read_text("job")
        parameters.finish()
        plans = describe_plans(select_job(_get_view(state), job_id))
        actions = self._source.list_actions()
        refusal = _explain_refusal(request) or ("" if actions else _NO_ACTIONS)
        page = ControlPage(job_id, () if refusal else actions, refusal, plans)
        return self._present(request, "control.html", "Control", page)

    def _answer_confirm(self, state: LiveState, request: Request) -> Response:
        if refusal := _explain_refusal(request):
            raise ForbiddenError(refusal)
        order = read_order(PageParameters(request.query_params))
        page = ConfirmPage(order, preview_order(_get_view(state), order))
        self._desk.offer(order, time.monotonic())
        return self._present(request, "confirm.html", "Confirm", page)

    async def _answer_order(self, request: Request) -> Response:
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > _MAX_BODY_BYTES:
                break
        answer = partial(self._carry_out, bytes(body))
        return await run_in_threadpool(self._answer_safely, answer, request)

    def _carry_out(self, body: bytes, request: Request) -> Response:
        values = parse_qs(body.decode(errors="replace")) if len(body) <= _MAX_BODY_BYTES else {}
        order_id = values.get("order", [""])[0]
        page = self._desk.carry_out(order_id, time.monotonic())
        return self._present(request, "outcome.html", "Control", page)


def read_order(parameters: PageParameters) -> ControlOrder:
    """Return the order that the parameters describe, with a new id; operators are given one per
    line.
    """
    job_id = parameters.read_text("job")
    word = parameters.read_choice("action", ("", *_ACTIONS), "")
    text = parameters.read_text("value").strip()
    parameters.finish()
    if not word:
        raise ParameterError("action", word, ", ".join(_ACTIONS))
    action = ControlAction(word)
    lines = text.splitlines() if action is ControlAction.OPERATORS else [text]
    values = tuple(line.strip() for line in lines if line.strip())
    return ControlOrder(uuid.uuid4().hex, job_id, action, values)


def _explain_refusal(request: Request) -> str:
    """Return why a caller may not control a job; empty if the caller may, as far as the
    gate knows.
    """
    return explain_refusal(CONTROL_METHOD, get_caller(request.scope), revoked=frozenset())


def _get_view(state: LiveState) -> StatusView:
    if state.view is None or state.problem:
        raise UnavailableError(state.problem or "nothing is known about the job yet")
    return state.view
