"""Addresses and sockets of the gRPC server."""

from __future__ import annotations

import logging
import os
import socket
import stat
from pathlib import Path
from typing import Any, NoReturn

import grpc
import pytest
from support.certificate_authority import CertificateAuthority

from rankdump.errors import ConfigError, ForbiddenError, RankdumpError, UnavailableError
from rankdumpd.agent.shm.slab_folder import MemoryShares, SlabFolder
from rankdumpd.server import grpc_server as server_module
from rankdumpd.server.grpc_server import GrpcServer, abort_on_error, parse_socket_path
from rankdumpd.server.metrics import MetricCounters
from rankdumpd.server.tls import ServerCertificates


@pytest.mark.parametrize(
    "address",
    ["0.0.0.0:0", "[::]:0", "example.org:1", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000", ""],
)
def test_server_without_tls_accepts_loopback_only(address):
    with pytest.raises(ConfigError):
        GrpcServer(address, ()).start()


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:0"])
def test_server_returns_real_port_for_port_zero(address):
    """Clients can connect to the returned address, which is free again after the stop."""
    server = GrpcServer(address, ())
    host, _, port = server.start().rpartition(":")
    assert int(port) > 0
    socket.create_connection((host, int(port))).close()
    with pytest.raises(UnavailableError, match=r"listen: .*: Address already in use"):
        GrpcServer(f"{host}:{port}", ()).start()
    server.stop(0)
    server.stop(0)


@pytest.mark.parametrize(
    ("host", "cause"), [("192.0.2.1", "Cannot assign requested address"), ("x" * 64, "too long")]
)
def test_server_tells_why_address_cannot_be_bound(tmp_path: Path, host: str, cause: str):
    """With the system's reason, as an error that may pass."""
    tls = ServerCertificates(CertificateAuthority(tmp_path / "ca").server())
    with pytest.raises(UnavailableError, match=f"^listen: {host}:7421 cannot be bound: .*{cause}"):
        GrpcServer(f"{host}:7421", (), tls=tls).start()


def test_server_tells_why_folder_of_socket_cannot_be_made(socket_folder: Path):
    (socket_folder / "file").touch()
    with pytest.raises(UnavailableError, match=r"cannot be bound: .*Not a directory"):
        GrpcServer(f"unix:{socket_folder}/file/below/made/a.sock", ()).start()


def test_server_socket_and_folder_are_for_owner_and_group(socket_folder: Path):
    """The socket has mode 0660 in a folder with 0750, and is removed by the stop."""
    path = socket_folder / "made" / "a.sock"
    server = GrpcServer(f"unix://{path}", ())
    assert server.start() == f"unix:{path}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o750
    server.stop(0)
    assert not path.exists()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_server_keeps_folder_that_shared_memory_created(socket_folder: Path, umask: int):
    """The folder of slabs beside the socket exists before the socket."""
    path = socket_folder / "made" / "a.sock"
    before = os.umask(umask)
    try:
        slabs = SlabFolder(
            path.parent / "slabs", group=-1, ring_bytes=1, memory=MemoryShares(1, 1, 1)
        )
        server = GrpcServer(f"unix:{path}", ())
        server.start()
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o750
    server.stop(0)
    slabs.leave()


def test_server_socket_is_never_open_to_others(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """Law: with any umask others can never write to the socket or its folder."""
    seen: list[int] = []
    give = server_module.os.chown

    def chown(path: Path, owner: int, group: int) -> None:
        seen.append(stat.S_IMODE(path.stat().st_mode))
        give(path, owner, group)

    monkeypatch.setattr(server_module.os, "chown", chown)
    earlier = os.umask(0)
    try:
        server = GrpcServer(f"unix:{socket_folder}/made/a.sock", ())
        server.start()
        server.stop(0)
    finally:
        assert os.umask(earlier) == 0
    assert seen == [0o700, 0o755]


def test_server_gives_socket_and_folder_to_group(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """The error names a group that this process may not use."""
    path, group = socket_folder / "made" / "a.sock", [os.getgid(), *os.getgroups()][-1]
    server = GrpcServer(f"unix:{path}", (), group=group)
    server.start()
    assert (path.stat().st_gid, path.parent.stat().st_gid) == (group, group)
    server.stop(0)

    def fail(_path: Path, _owner: int, _group: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(server_module.os, "chown", fail)
    with pytest.raises(ConfigError, match=r"agent\.runtime_group"):
        server.start()
    server.stop(0)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_server_rejects_socket_folder_writable_by_others(socket_folder: Path, mode: int):
    """Another process could listen in place of the server."""
    folder = socket_folder / "open"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ConfigError, match="only its owner and group may write to"):
        GrpcServer(f"unix:{folder}/a.sock", ()).start()
    assert list(folder.iterdir()) == []


def test_server_replaces_stale_socket_only(socket_folder: Path):
    """A socket with a listening server is kept."""
    path = socket_folder / "a.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    first = GrpcServer(f"unix:{path}", ())
    first.start()
    with pytest.raises(UnavailableError, match="another server listens at it"):
        GrpcServer(f"unix:{path}", ()).start()
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(path))
    first.stop(0)


def test_server_leaves_other_files_in_place(socket_folder: Path):
    """A file at the path of the socket is kept."""
    path = socket_folder / "precious"
    path.write_text("data")
    with pytest.raises(ConfigError, match="no other file"):
        GrpcServer(f"unix:{path}", ()).start()
    assert path.read_text() == "data"


@pytest.mark.parametrize("address", ["unix:relative", "unix:", "unix:/" + "x" * 120])
def test_server_rejects_invalid_socket_paths(address):
    with pytest.raises(ConfigError):
        parse_socket_path(address)


def test_server_stop_without_start_does_nothing():
    GrpcServer("127.0.0.1:0", ()).stop(0)


class AbortedCallError(Exception):
    """Raised by gRPC in a call that is aborted."""


class CallContext:
    """The part of a call that ends it."""

    def set_trailing_metadata(self, metadata: tuple[tuple[str, str], ...]) -> None: ...

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise AbortedCallError(code, details)


@pytest.mark.parametrize(
    ("error", "levels"),
    [
        (UnavailableError("worker 7 is being restarted"), ["INFO", "DEBUG", "DEBUG"]),
        (ForbiddenError("worker 7 is for others"), ["WARNING", "WARNING", "WARNING"]),
    ],
)
def test_calls_that_are_tried_again_are_logged_once_for_a_reason(
    caplog: pytest.LogCaptureFixture, error: RankdumpError, levels: list[str]
):
    """All ranks of a worker that is restarted call at once; each call is counted."""
    caplog.set_level(logging.DEBUG, server_module.__name__)
    counters, context = MetricCounters(), CallContext()
    ended: Any = context
    for _ in range(3):
        with pytest.raises(AbortedCallError), abort_on_error(ended, counters):
            raise error
    assert [record.levelname for record in caplog.records] == levels
    (sample,) = counters.samples()
    assert sample.value == 3
