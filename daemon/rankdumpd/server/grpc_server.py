"""gRPC server with health and reflection on one address, which is a Unix socket or a TCP port, and
the status codes for calls that end with an error of rankdump. Depends on no particular service.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
from collections.abc import Generator, Sequence
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rankdump._core.daemon_endpoint import is_loopback, parse_tcp_address
from rankdump._wire.channel import ANSWERED_KEY, get_status_code
from rankdump.errors import ConfigError, RankdumpError, RetryableError, UnavailableError
from rankdumpd.server.call_gate import CallGate
from rankdumpd.server.logs import RecentTexts
from rankdumpd.server.metrics import REFUSED_CALLS_METRIC, MetricCounters
from rankdumpd.server.state_files import RequiredFiles
from rankdumpd.server.tls import ServerCertificates

MAX_RECEIVE_BYTES = 8 << 20
# Every open stream occupies a thread, and up to 1,024 agents have one; threads start when needed.
MAX_THREADS = 1280
_SOCKET_MODE = 0o660
_FOLDER_MODE = 0o750
_PRIVATE_MODE = 0o700
# Umask while the socket is bound. Files that other threads create at that time lose only write
# permissions of group and others.
_BINDING_UMASK = 0o022
_STOPS = "it stops"

_logger = logging.getLogger(__name__)


class GrpcService(Protocol):
    """A part of the daemon that offers gRPC services."""

    @property
    def service_names(self) -> tuple[str, ...]:
        """Full names of the gRPC services of this part."""
        ...

    def register(self, server: grpc.Server) -> None:
        """Add the services of this part to a server that has not started."""
        ...


class GrpcServer:
    """A gRPC server for several services; `start` binds its address, `stop` may be called at any
    time.
    """

    def __init__(
        self,
        address: str,
        services: Sequence[GrpcService],
        *,
        setting: str = "listen",
        tls: ServerCertificates | None = None,
        gate: CallGate | None = None,
        group: int = -1,
        required: RequiredFiles | None = None,
    ) -> None:
        """Serve TCP with the certificates in `tls`, if given; give the socket to `group`, unless it
        is -1.

        Errors name `setting`, the setting that has the address. The socket is added to the
        `required` files.
        """
        self._required = required or RequiredFiles()
        self._address, self._services, self._setting = address, services, setting
        self._tls, self._gate, self._group = tls, gate, group
        self._health = health.HealthServicer()
        self._threads: futures.ThreadPoolExecutor | None = None
        self._server: grpc.Server | None = None
        self._names: list[str] = []
        self._fault = "it starts"

    def start(self) -> str:
        """Bind the address and serve; return the address for clients, with the port
        that was bound.
        """
        path = check_address(self._setting, self._address, has_tls=self._tls is not None)
        if path:
            _prepare_socket_path(self._setting, path, self._group)
        self._threads = futures.ThreadPoolExecutor(MAX_THREADS, "rankdumpd-rpc")
        server = grpc.server(
            self._threads,
            interceptors=[self._gate] if self._gate else [],
            options=[
                ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
                # With this option, a second server could share the port unnoticed.
                ("grpc.so_reuseport", 0),
            ],
        )
        names = self._register(server)
        if path:
            bound = _bind_socket(server, self._setting, path, self._group)
            self._required.watch_file(
                path, "only ranks that are connected already can reach this agent"
            )
        else:
            bound = _bind(server, self._setting, self._address, self._tls)
        if self._gate:
            self._gate.start()
        server.start()
        self._server = server
        self._names = names
        self.set_serving(is_serving=True)
        return bound

    def explain_fault(self) -> str:
        """Return why health checks report that this server does not serve; empty when it serves."""
        return self._fault

    def set_serving(self, *, is_serving: bool) -> None:
        """Set the status that health checks report; calls work in either case."""
        if self._fault != _STOPS:
            self._fault = "" if is_serving else "a file that it needs is missing; its log names it"
        states = health_pb2.HealthCheckResponse
        for name in self._names:
            self._health.set(name, states.SERVING if is_serving else states.NOT_SERVING)

    def refuse(self) -> None:
        """Report in health checks that this server is about to stop; calls still work."""
        self._fault = _STOPS
        self._health.enter_graceful_shutdown()

    def stop(self, grace_s: float) -> None:
        """Refuse new calls, end running ones after `grace_s`; may be repeated."""
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


def check_address(setting: str, address: str, *, has_tls: bool) -> Path | None:
    """Return the path of the socket for a `unix:` address, None for TCP; ConfigError where a server
    may not listen at the address, or nobody can.
    """
    path = parse_socket_path(address, setting)
    if path is None and not (parse_tcp_address(address) and (has_tls or is_loopback(address))):
        allowed = "unix:/path, host:port on loopback, or any host:port with certificates ([tls])"
        raise ConfigError("settings", setting, address, allowed)
    return path


def parse_socket_path(address: str, setting: str = "listen") -> Path | None:
    """Return the path of the socket for a `unix:` address; None for TCP."""
    if not address.startswith("unix:"):
        return None
    text = address.removeprefix("unix:")
    path = Path("/" + text.lstrip("/") if text.startswith("//") else text)
    if not path.is_absolute() or len(os.fsencode(path)) > 107:
        allowed = "an absolute socket path of at most 107 bytes"
        raise ConfigError("settings", setting, address, allowed)
    return path


def _bind(server: grpc.Server, setting: str, address: str, tls: ServerCertificates | None) -> str:
    _check_bindable(setting, address)
    try:
        if tls:
            port = server.add_secure_port(address, tls.build_server_credentials())
        else:
            port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise _build_bind_error(setting, address, str(error)) from None
    if port == 0:
        raise _build_bind_error(setting, address, "the port cannot be bound")
    return f"{address.rpartition(':')[0]}:{port}"


def _check_bindable(setting: str, address: str) -> None:
    """Raise an UnavailableError with the system's reason if none of the host's addresses can be
    bound.

    gRPC would only report that binding failed, after a line of its own on standard error.
    """
    host, port = parse_tcp_address(address) or ("", 0)
    fault: OSError | None = None
    try:
        for family, kind, _, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            try:
                with socket.socket(family, kind) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(place)
                return
            except OSError as error:
                fault = error
    except socket.gaierror as error:
        fault = error
    except UnicodeError as error:
        raise _build_bind_error(setting, address, str(error)) from None
    if fault:
        raise _build_bind_error(setting, address, fault.strerror or str(fault))


def _bind_socket(server: grpc.Server, setting: str, path: Path, group: int) -> str:
    # Connecting to a socket needs write permission, so with this umask no other user can connect
    # before the mode is set.
    earlier = os.umask(_BINDING_UMASK)
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(path))
        path.unlink()
        server.add_insecure_port(f"unix:{path}")
    except (OSError, RuntimeError) as error:
        cause = isinstance(error, OSError) and error.strerror
        raise _build_bind_error(setting, path, cause or str(error)) from None
    finally:
        os.umask(earlier)
    _give_to_group(path, group, _SOCKET_MODE)
    return f"unix:{path}"


def _prepare_socket_path(setting: str, path: Path, group: int) -> None:
    if not path.parent.is_dir():
        try:
            path.parent.parent.mkdir(parents=True, exist_ok=True)
            path.parent.mkdir(_PRIVATE_MODE)
        except OSError as error:
            raise _build_bind_error(setting, path, f"{path.parent}: {error.strerror}") from None
        _give_to_group(path.parent, group, _FOLDER_MODE)
    elif path.parent.stat().st_mode & stat.S_IWOTH:
        allowed = "a socket in a folder that only its owner and group may write to"
        raise ConfigError("settings", setting, str(path), allowed)
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError("settings", setting, str(path), "a path at which there is no other file")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(5)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            _logger.info("replacing the socket %s, on which no server listens any more", path)
            path.unlink()
            return
        except OSError as error:
            raise _build_bind_error(setting, path, error.strerror or str(error)) from None
    raise _build_bind_error(setting, path, "another server listens at it")


def _build_bind_error(setting: str, address: str | Path, cause: str) -> UnavailableError:
    # This is no ConfigError: the address may become usable when the network is up or another
    # process ends.
    return UnavailableError(f"{setting}: {address} cannot be bound: {cause}")


def _give_to_group(path: Path, group: int, mode: int) -> None:
    try:
        os.chown(path, -1, group)
    except OSError as error:
        allowed = f"a group that this process may give {path} to ({error.strerror})"
        raise ConfigError("settings", "agent.runtime_group", group, allowed) from None
    path.chmod(mode)


_QUIET_S = 10.0
"""Seconds in which calls that fail for the same reason are logged once, because callers
try again.
"""
_recent_failures = RecentTexts(_QUIET_S)


@contextmanager
def abort_on_error(context: grpc.ServicerContext, counters: MetricCounters) -> Generator[None]:
    """If the block raises a RankdumpError, log and count it, and end the call with its status code.

    Any other exception passes: gRPC logs it and ends the call with UNKNOWN.
    """
    try:
        yield
    except RankdumpError as error:
        code = get_status_code(error)
        text, level = f"call failed with {code.name}: {error}", logging.WARNING
        if isinstance(error, RetryableError):
            # When a worker is being restarted, all of its ranks call at once and repeatedly.
            level = logging.INFO if _recent_failures.is_new(text) else logging.DEBUG
        _logger.log(level, "%s", text)
        counters.add(REFUSED_CALLS_METRIC, code=code.name)
        context.set_trailing_metadata(((ANSWERED_KEY, "1"),))
        context.abort(code, str(error))
