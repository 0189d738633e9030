"""gRPC server with health and reflection on one address, and the relay for a socket that the
service manager holds open. Knows no service by name.

gRPC binds addresses and cannot serve an inherited descriptor. So the server listens on a socket
beside it, and connections to the public socket are relayed: the session requests of ranks, which
are redirected to the socket beside, and requests of the command line. Frames never take this
way.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import stat
import threading
from collections.abc import Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rankdump._core.daemon_endpoint import is_loopback
from rankdump.errors import ConfigError
from rankdumpd.server.call_gate import CallGate
from rankdumpd.server.state_files import RequiredFiles
from rankdumpd.server.tls import ServerCertificates

MAX_RECEIVE_BYTES = 8 << 20
# Every open stream holds a thread, of 1,024 agents as well; they are started only when needed.
MAX_THREADS = 1280
_SOCKET_MODE = 0o660
_FOLDER_MODE = 0o750
_PRIVATE_MODE = 0o700
# What other threads make in that moment may lack nothing but what others could write.
_BINDING_UMASK = 0o022

_logger = logging.getLogger(__name__)


class GrpcService(Protocol):
    """What a half of the daemon offers on the wire."""

    @property
    def service_names(self) -> tuple[str, ...]:
        """Full names of its gRPC services."""
        ...

    def register(self, server: grpc.Server) -> None:
        """Add its servicers to a server that has not started."""
        ...


class GrpcServer:
    """A gRPC server for some services; `start` binds, `stop` may be called at any time."""

    def __init__(
        self,
        address: str,
        services: Sequence[GrpcService],
        *,
        tls: ServerCertificates | None = None,
        gate: CallGate | None = None,
        group: int = -1,
        required: RequiredFiles | None = None,
    ) -> None:
        """Serve TCP with certificates, if there are any; give a socket to a group, if not -1.

        `required` hears where the socket stands.
        """
        self._required = required or RequiredFiles()
        self._address, self._services = address, services
        self._tls, self._gate, self._group = tls, gate, group
        self._health = health.HealthServicer()
        self._threads: futures.ThreadPoolExecutor | None = None
        self._server: grpc.Server | None = None
        self._names: list[str] = []

    def start(self) -> str:
        """Bind and serve; return the address clients dial, with the real port."""
        path = parse_socket_path(self._address)
        if path:
            _prepare_socket_path(path, self._group)
        else:
            _check_protected(self._address, self._tls)
        self._threads = futures.ThreadPoolExecutor(MAX_THREADS, "rankdumpd-rpc")
        server = grpc.server(
            self._threads,
            interceptors=[self._gate] if self._gate else [],
            options=[
                ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
                # Without this a second server would share the port unnoticed.
                ("grpc.so_reuseport", 0),
            ],
        )
        names = self._register(server)
        if path:
            bound = _bind_socket(server, path, self._group)
            self._required.watch_file(
                path, "no rank finds this agent that is not connected already"
            )
        else:
            bound = _bind(server, self._address, self._tls)
        if self._gate:
            self._gate.start()
        server.start()
        self._server = server
        self._names = names
        self.show(well=True)
        return bound

    def show(self, *, well: bool) -> None:
        """Tell health checks how this server stands; calls work all the same."""
        states = health_pb2.HealthCheckResponse
        for name in self._names:
            self._health.set(name, states.SERVING if well else states.NOT_SERVING)

    def refuse(self) -> None:
        """Tell health checks that this server is about to stop; calls still work."""
        self._health.enter_graceful_shutdown()

    def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones that long, then end them; may be repeated."""
        if self._server is not None:
            self._server.stop(grace_s).wait()
        if self._threads is not None:
            self._threads.shutdown(wait=True)
        if self._gate:
            self._gate.stop()
        path = parse_socket_path(self._address) if self._server is not None else None
        if path:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        self._server = self._threads = None

    def _register(self, server: grpc.Server) -> list[str]:
        names = [name for service in self._services for name in service.service_names]
        for service in self._services:
            service.register(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(
            (*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        return ["", *names]


def parse_socket_path(address: str) -> Path | None:
    """Return the socket's path of a `unix:` address; None for TCP."""
    if not address.startswith("unix:"):
        return None
    text = address.removeprefix("unix:")
    path = Path("/" + text.lstrip("/") if text.startswith("//") else text)
    if not path.is_absolute() or len(os.fsencode(path)) > 107:
        raise ConfigError("listen", "", address, "an absolute socket path of at most 107 bytes")
    return path


def _bind(server: grpc.Server, address: str, tls: ServerCertificates | None) -> str:
    try:
        if tls:
            port = server.add_secure_port(address, tls.build_server_credentials())
        else:
            port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise _build_address_error(address, str(error)) from None
    if port == 0:
        raise _build_address_error(address, "the port cannot be bound")
    return f"{address.rpartition(':')[0]}:{port}"


def _bind_socket(server: grpc.Server, path: Path, group: int) -> str:
    # Who may not write to a socket cannot connect: nobody else does before the mode is right.
    earlier = os.umask(_BINDING_UMASK)
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        raise _build_address_error(str(path), str(error)) from None
    finally:
        os.umask(earlier)
    _give_to_group(path, group, _SOCKET_MODE)
    return f"unix:{path}"


def _prepare_socket_path(path: Path, group: int) -> None:
    if not path.parent.is_dir():
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(_PRIVATE_MODE)
        _give_to_group(path.parent, group, _FOLDER_MODE)
    elif path.parent.stat().st_mode & stat.S_IWOTH:
        allowed = "a socket in a folder that only its owner and group may write to"
        raise ConfigError("listen", "", str(path), allowed)
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError("listen", "", str(path), "a path where no other file stands")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(5)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            _logger.info("replacing %s, which no server listens on any more", path)
            path.unlink()
            return
        except OSError as error:
            raise _build_address_error(str(path), str(error)) from None
    raise _build_address_error(str(path), "another server listens there")


def _build_address_error(address: str, cause: str) -> ConfigError:
    return ConfigError("listen", "", address, f"an address that is free ({cause})")


def _give_to_group(path: Path, group: int, mode: int) -> None:
    try:
        os.chown(path, -1, group)
    except OSError as error:
        allowed = f"a group that this process may give {path} to ({error.strerror})"
        raise ConfigError("settings", "agent.runtime_group", group, allowed) from None
    path.chmod(mode)


def _check_protected(address: str, tls: ServerCertificates | None) -> None:
    port = address.rpartition(":")[2]
    if not port.isdecimal() or int(port) > 0xFFFF or not (tls or is_loopback(address)):
        raise ConfigError(
            "listen",
            "",
            address,
            "unix:/path, host:port on loopback, or any host:port with certificates ([tls])",
        )


RELAY_PEER_PREFIX = "rankdumpd-passed-on"
"""Begins the abstract name of a connection that was passed on: servers see it as its peer."""
_FIRST_DESCRIPTOR = 3
_RELAY_CHUNK_BYTES = 1 << 16


def inherit_socket(environ: Mapping[str, str]) -> socket.socket | None:
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


def format_public_address(listener: socket.socket) -> str:
    """Return the address that ranks and people know."""
    return f"unix:{listener.getsockname()}"


def format_direct_address(listener: socket.socket) -> str:
    """Return the address to serve on, beside the public one."""
    return f"{format_public_address(listener)}.direct"


def is_relayed(peer: str) -> bool:
    """Return whether a server's peer came to the public socket."""
    return peer.startswith(f"unix-abstract:{RELAY_PEER_PREFIX}")


def find_own_socket(listen: str, peer: str) -> str:
    """Return the name of a server's own socket for a peer that came to the one beside it."""
    path = parse_socket_path(listen) if is_relayed(peer) else None
    return path.name if path else ""


class SocketRelay:
    """A door in front of a server: connections to an inherited socket are passed on to it."""

    def __init__(self, listener: socket.socket, server: GrpcServer) -> None:
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
        return format_public_address(self._listener)

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
                _logger.warning("a connection was not accepted: %s", error)
                await asyncio.sleep(1)
                continue
            task = self._loop.create_task(self._pass_on(client))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _pass_on(self, client: socket.socket) -> None:
        server = socket.socket(socket.AF_UNIX)
        with client, server, contextlib.suppress(OSError):
            server.setblocking(False)
            server.bind(f"\0{RELAY_PEER_PREFIX}/{os.getpid()}/{next(self._numbers)}")
            await self._loop.sock_connect(server, self._target)
            client.setblocking(False)
            await asyncio.gather(self._copy(client, server), self._copy(server, client))

    async def _copy(self, source: socket.socket, target: socket.socket) -> None:
        """Copy to the end of a direction; the other may go on."""
        while some := await self._loop.sock_recv(source, _RELAY_CHUNK_BYTES):
            await self._loop.sock_sendall(target, some)
        target.shutdown(socket.SHUT_WR)
