"""Addresses a server may take, and those it may not."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from rankdump.contract.errors import ConfigError
from rankdumpd.server import Server, socket_path


@pytest.mark.parametrize(
    "address",
    ["0.0.0.0:0", "[::]:0", "example.org:1", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000", ""],
)
def test_only_loopback_without_tls(address):
    """Anything but this host is refused as long as nothing protects it."""
    with pytest.raises(ConfigError):
        Server(address, ()).start()


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:0"])
def test_port_zero_becomes_a_real_one(address):
    """The address that comes back can be dialled, and is free again after stop."""
    server = Server(address, ())
    host, _, port = server.start().rpartition(":")
    assert int(port) > 0
    socket.create_connection((host, int(port))).close()
    with pytest.raises(ConfigError, match="free"):
        Server(f"{host}:{port}", ()).start()
    server.stop(0)
    server.stop(0)


def test_socket_and_its_folder_are_for_owner_and_group(socket_folder: Path):
    """The socket is 0660 in a folder made 0750, and gone after stop."""
    path = socket_folder / "made" / "a.sock"
    server = Server(f"unix://{path}", ())
    assert server.start() == f"unix:{path}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o750
    server.stop(0)
    assert not path.exists()


def test_stale_socket_is_replaced_a_live_one_is_not(socket_folder: Path):
    """A socket nobody listens on makes way; one with a server behind it does not."""
    path = socket_folder / "a.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    first = Server(f"unix:{path}", ())
    first.start()
    with pytest.raises(ConfigError, match="another server listens there"):
        Server(f"unix:{path}", ()).start()
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(path))
    first.stop(0)


def test_other_files_are_never_removed(socket_folder: Path):
    """A file where the socket should be is left alone."""
    path = socket_folder / "precious"
    path.write_text("data")
    with pytest.raises(ConfigError, match="no other file"):
        Server(f"unix:{path}", ()).start()
    assert path.read_text() == "data"


@pytest.mark.parametrize("address", ["unix:relative", "unix:", "unix:/" + "x" * 120])
def test_socket_paths_that_cannot_be(address):
    """A path no socket can have is refused before anything is made."""
    with pytest.raises(ConfigError):
        socket_path(address)


def test_stop_without_start():
    """Stopping what never started is nothing."""
    Server("127.0.0.1:0", ()).stop(0)
