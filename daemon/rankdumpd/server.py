"""One gRPC server with health and reflection on one address; knows no service by name."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
from collections.abc import Sequence
from concurrent import futures
from pathlib import Path
from typing import Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rankdump.contract.errors import ConfigError
from rankdump.wire.channel import is_loopback

MAX_RECEIVE_BYTES = 8 << 20
# Every open stream holds a thread, of 1,024 agents as well; they are started only when needed.
MAX_THREADS = 1280
_SOCKET_MODE = 0o660
_FOLDER_MODE = 0o750

_log = logging.getLogger(__name__)


class Service(Protocol):
    """What a half of the daemon offers on the wire."""

    @property
    def service_names(self) -> tuple[str, ...]:
        """Full names of its gRPC services."""
        ...

    def register(self, server: grpc.Server) -> None:
        """Add its servicers to a server that has not started."""
        ...


class Server:
    """A gRPC server for some services; `start` binds, `stop` may be called at any time."""

    def __init__(self, address: str, services: Sequence[Service]) -> None:
        self._address = address
        self._services = services
        self._health = health.HealthServicer()
        self._threads: futures.ThreadPoolExecutor | None = None
        self._server: grpc.Server | None = None

    def start(self) -> str:
        """Bind and serve; return the address clients dial, with the real port."""
        path = socket_path(self._address)
        if path:
            _make_way(path)
        else:
            _check_loopback(self._address)
        self._threads = futures.ThreadPoolExecutor(MAX_THREADS, "rankdumpd-rpc")
        server = grpc.server(
            self._threads,
            options=[
                ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
                # Without this a second server would share the port unnoticed.
                ("grpc.so_reuseport", 0),
            ],
        )
        names = self._register(server)
        bound = _bind(server, self._address, path)
        server.start()
        self._server = server
        for name in names:
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return bound

    def refuse(self) -> None:
        """Tell health checks that this server is about to stop; calls still work."""
        self._health.enter_graceful_shutdown()

    def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones that long, then end them; may be repeated."""
        if self._server is not None:
            self._server.stop(grace_s).wait()
        if self._threads is not None:
            self._threads.shutdown(wait=True)
        path = socket_path(self._address)
        if path and self._server is not None:
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


def socket_path(address: str) -> Path | None:
    """Return the socket's path of a `unix:` address; None for TCP."""
    if not address.startswith("unix:"):
        return None
    text = address.removeprefix("unix:")
    path = Path("/" + text.lstrip("/") if text.startswith("//") else text)
    if not path.is_absolute() or len(os.fsencode(path)) > 107:
        raise ConfigError("listen", "", address, "an absolute socket path of at most 107 bytes")
    return path


def _bind(server: grpc.Server, address: str, path: Path | None) -> str:
    try:
        port = server.add_insecure_port(f"unix:{path}" if path else address)
    except RuntimeError as error:
        raise _taken(address, str(error)) from None
    if path:
        path.chmod(_SOCKET_MODE)
        return f"unix:{path}"
    if port == 0:
        raise _taken(address, "the port cannot be bound")
    return f"{address.rpartition(':')[0]}:{port}"


def _make_way(path: Path) -> None:
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True)
        path.parent.chmod(_FOLDER_MODE)
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
            _log.info("replacing %s, which no server listens on any more", path)
            path.unlink()
            return
        except OSError as error:
            raise _taken(str(path), str(error)) from None
    raise _taken(str(path), "another server listens there")


def _taken(address: str, cause: str) -> ConfigError:
    return ConfigError("listen", "", address, f"an address that is free ({cause})")


def _check_loopback(address: str) -> None:
    port = address.rpartition(":")[2]
    if not is_loopback(address) or not port.isdecimal() or int(port) > 0xFFFF:
        raise ConfigError(
            "listen", "", address, "unix:/path, or host:port on loopback as long as there is no TLS"
        )
