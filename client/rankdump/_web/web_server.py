"""Server of the pages on the loopback interface: the address that it prints, and its threads."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import anyio.to_thread
import uvicorn

from rankdump._web.access_gate import AccessGate, make_token_query
from rankdump._web.access_tokens import AccessTokens
from rankdump._web.application import WebPages
from rankdump._web.comparison_process import ComparisonProcesses
from rankdump._web.dump_source import DumpSource
from rankdump._web.job_source import JobSource
from rankdump._web.query_process import QueryProcess
from rankdump.errors import UnavailableError

LOOPBACK = "127.0.0.1"
_THREADS = 4
"""Pages that are made at a time: more need more memory, and no page is done earlier."""
_MAX_WAITING = 64
"""Connections that are not accepted yet."""


def bind_socket(port: int) -> socket.socket:
    """Return a socket that listens on the loopback interface; UnavailableError for a taken port."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((LOOPBACK, port))
        made.listen(_MAX_WAITING)
    except OSError as error:
        made.close()
        raise UnavailableError(f"{LOOPBACK}:{port}: cannot listen: {error.strerror}") from None
    return made


def serve_trees(
    trees: Sequence[Path], *, port: int, opens_browser: bool, job: JobSource | None = None
) -> None:
    """Serve the pages of trees and of a running job until a signal comes.

    CorruptedError for a folder that is no tree.
    """
    sources = [DumpSource(tree) for tree in trees]
    queries, comparisons = QueryProcess(), ComparisonProcesses()
    try:
        pages = WebPages(sources, queries, comparisons, job)
        _serve_pages(pages, port, opens_browser=opens_browser)
    except KeyboardInterrupt:
        pass  # that is how it is ended
    finally:
        queries.close()
        comparisons.close()
        for source in sources:
            source.close()


def _serve_pages(pages: WebPages, port: int, *, opens_browser: bool) -> None:
    listening = bind_socket(port)
    tokens = AccessTokens(time.monotonic())
    bound = listening.getsockname()[1]
    address = f"http://{LOOPBACK}:{bound}/?{make_token_query(tokens.token)}"
    gate = AccessGate(
        pages.make_application(), tokens, time.monotonic, writing_paths=pages.writing_paths
    )
    sys.stdout.write("\n".join(_describe_address(address, bound)) + "\n")
    sys.stdout.flush()
    if opens_browser and has_desktop(os.environ):
        webbrowser.open(address)
    asyncio.run(_serve(gate, listening, pages.close))


class PageServer(uvicorn.Server):
    """Ends streams of events before it waits for requests that are under way."""

    def __init__(self, config: uvicorn.Config, end_streams: Callable[[], None]) -> None:
        super().__init__(config)
        self._end_streams = end_streams

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End it."""
        self._end_streams()
        await super().shutdown(sockets)


async def _serve(
    gate: AccessGate, listening: socket.socket, end_streams: Callable[[], None]
) -> None:
    anyio.to_thread.current_default_thread_limiter().total_tokens = _THREADS
    config = uvicorn.Config(
        gate,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    await PageServer(config, end_streams).serve(sockets=[listening])


def _describe_address(address: str, port: int) -> list[str]:
    return [
        address,
        "The address works once, for ten minutes; Ctrl-C ends the server. From another machine:",
        f"  ssh -L {port}:{LOOPBACK}:{port} {socket.gethostname()}",
    ]


def has_desktop(environment: Mapping[str, str]) -> bool:
    """Return whether a browser can be opened: not in a terminal alone, nor on another machine."""
    return any(environment.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
