"""A socket that the service manager holds open, so that ranks may knock before the agent runs.

gRPC binds addresses and cannot serve a descriptor. So the agent listens on a socket beside it, and
what comes to the public one is passed on: the first words of each rank, which is sent to the socket
beside, and the questions of people. Frames never come this way.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import threading
from collections.abc import Mapping

from rankdump.contract.errors import ConfigError
from rankdumpd.server import Server, socket_path

PASSED_ON = "rankdumpd-passed-on"
"""Begins the abstract name of a connection that was passed on: servers see it as its peer."""
_FIRST_DESCRIPTOR = 3
_PIECE_BYTES = 1 << 16

_log = logging.getLogger(__name__)


def inherited(environ: Mapping[str, str]) -> socket.socket | None:
    """Return the socket that the service manager handed to this process; None when there is none.

    ConfigError when there are several, or one of another kind (sd_listen_fds(3)).
    """
    count, pid = environ.get("LISTEN_FDS", ""), environ.get("LISTEN_PID", "")
    if not count.isdecimal() or int(count) == 0 or pid != str(os.getpid()):
        return None
    if int(count) > 1:
        raise ConfigError("environment", "LISTEN_FDS", count, "one socket")
    found = socket.socket(fileno=_FIRST_DESCRIPTOR)
    name = found.getsockname()
    listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if found.family != socket.AF_UNIX or not listens or not isinstance(name, str) or not name:
        raise ConfigError("environment", "LISTEN_FDS", name, "a Unix socket with a path, listening")
    found.set_inheritable(False)
    return found


def public_address(listener: socket.socket) -> str:
    """Return the address that ranks and people know."""
    return f"unix:{listener.getsockname()}"


def direct_address(listener: socket.socket) -> str:
    """Return the address to serve on, beside the public one."""
    return f"{public_address(listener)}.direct"


def was_passed_on(peer: str) -> bool:
    """Return whether a server's peer came to the public socket."""
    return peer.startswith(f"unix-abstract:{PASSED_ON}")


def own_socket(listen: str, peer: str) -> str:
    """Return the name of a server's own socket for a peer that came to the one beside it."""
    path = socket_path(listen) if was_passed_on(peer) else None
    return path.name if path else ""


class Relay:
    """A door in front of a server: connections to an inherited socket are passed on to it."""

    def __init__(self, listener: socket.socket, server: Server) -> None:
        """Take over a listening socket and the server at the direct address beside it."""
        self._listener, self._server = listener, server
        self._loop = asyncio.new_event_loop()
        self._numbers = itertools.count(1)
        self._target = ""
        self._under_way: set[asyncio.Task[None]] = set()
        self._thread: threading.Thread | None = None

    def start(self) -> str:
        """Serve, then pass on what has knocked meanwhile; return the public address."""
        self._target = self._server.start().removeprefix("unix:")
        self._thread = threading.Thread(target=self._run, name="rankdumpd-relay")
        self._thread.start()
        return public_address(self._listener)

    def refuse(self) -> None:
        """Say in health checks that the end is near."""
        self._server.refuse()

    def show(self, *, well: bool) -> None:
        """Tell health checks how it stands."""
        self._server.show(well=well)

    def stop(self, grace_s: float) -> None:
        """End all calls; the socket stays with the service manager. May be repeated."""
        self._server.stop(grace_s)
        if self._thread:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._thread = None
        self._listener.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._listener.setblocking(False)
        accepting = self._loop.create_task(self._accept())
        try:
            self._loop.run_forever()
        finally:
            for task in (accepting, *self._under_way):
                task.cancel()
            ending = asyncio.gather(accepting, *self._under_way, return_exceptions=True)
            self._loop.run_until_complete(ending)
            self._loop.close()

    async def _accept(self) -> None:
        while True:
            try:
                client, _ = await self._loop.sock_accept(self._listener)
            except OSError as error:  # no descriptors, say: who knocks waits
                _log.warning("a connection was not accepted: %s", error)
                await asyncio.sleep(1)
                continue
            task = self._loop.create_task(self._pass_on(client))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _pass_on(self, client: socket.socket) -> None:
        server = socket.socket(socket.AF_UNIX)
        with client, server, contextlib.suppress(OSError):
            server.setblocking(False)
            server.bind(f"\0{PASSED_ON}/{os.getpid()}/{next(self._numbers)}")
            await self._loop.sock_connect(server, self._target)
            client.setblocking(False)
            await asyncio.gather(self._copy(client, server), self._copy(server, client))

    async def _copy(self, source: socket.socket, target: socket.socket) -> None:
        """Copy to the end of a direction; the other may go on."""
        while some := await self._loop.sock_recv(source, _PIECE_BYTES):
            await self._loop.sock_sendall(target, some)
        target.shutdown(socket.SHUT_WR)
