"""Paths of a daemon's HTTP server: metrics for Prometheus, health for probes, and the pages of dump
trees if they are switched on. This module is imported only if an HTTP address is configured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp

from rankdump._http.request_gate import (
    READ_METHOD,
    RoleGate,
    admit_local_caller,
    format_request_line,
    get_caller,
)
from rankdump._http.server_guard import HttpsGuard, RefusalSink

METRICS_PATH, HEALTH_PATH = "/metrics", "/health"
_PATH_METHODS = {
    METRICS_PATH: "/rankdump.wire.v1.MetricsService/Metrics",
    HEALTH_PATH: "/grpc.health.v1.Health/Check",
}
"""gRPC method for each path: who may call the method may read the path. Pages need the role for the
status.
"""


def make_application(
    registry: CollectorRegistry,
    explain_fault: Callable[[], str],
    *,
    guard: HttpsGuard | None,
    refusals: RefusalSink,
    pages: ASGIApp | None = None,
) -> ASGIApp:
    """Return the application with its access control; `explain_fault` returns an empty text when
    the daemon is healthy. Without `pages` every other path is refused.
    """

    def answer_metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    def answer_health(request: Request) -> Response:
        fault = explain_fault()
        text = f"NOT_SERVING: {fault}\n" if fault else "SERVING\n"
        return PlainTextResponse(text, 503 if fault else 200)

    async def refuse_path(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        why = f"metrics are at {METRICS_PATH}, health is at {HEALTH_PATH}"
        line = format_request_line(request.scope)
        # In a thread, because the audit log may wait for a disk.
        await asyncio.to_thread(refusals.add, "path", get_caller(request.scope), line, why)
        return PlainTextResponse(f"{why}\n", status)

    routes: list[BaseRoute] = [
        Route(METRICS_PATH, answer_metrics),
        Route(HEALTH_PATH, answer_health),
    ]
    if pages is not None:
        routes.append(Mount("/", pages))
    inner = Starlette(routes=routes, exception_handlers={HTTPException: refuse_path})
    inner.router.redirect_slashes = False
    explain = guard.explain_refusal if guard else admit_local_caller
    return RoleGate(inner, explain, refusals, _find_method)


def _find_method(path: str) -> str:
    return _PATH_METHODS.get(path, READ_METHOD)
