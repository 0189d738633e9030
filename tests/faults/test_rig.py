"""Tools of the rig: fault layer, control page, proxy."""

from __future__ import annotations

import errno
import os
import re
import socket
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.connection_proxy import ConnectionProxy
from faults.control_page import CALLS, ControlPage
from faults.fault_layer import FaultLayer

SOURCES = Path(__file__).parents[2]
_BY_NAME = re.compile(
    rf"^\s*from (os|time|sqlite3) import .*\b({'|'.join(CALLS)}|time|time_ns|connect)\b", re.M
)


@pytest.fixture
def control(tmp_path: Path) -> Iterator[ControlPage]:
    made = ControlPage(tmp_path / "control")
    layer = FaultLayer(made, str(tmp_path / "disk"))
    (tmp_path / "disk").mkdir()
    yield made
    layer.undo()


def test_daemons_import_no_call_by_name():
    """What is imported by name is out of the layer's reach."""
    for path in (SOURCES / "daemon").rglob("*.py"):
        assert not _BY_NAME.search(path.read_text()), path


def test_layer_fails_calls_only_below_its_prefix(control: ControlPage, tmp_path: Path):
    """By path, by descriptor, and by a path relative to a folder's descriptor."""
    folder = os.open(tmp_path / "disk", os.O_RDONLY)
    file = os.open(tmp_path / "disk" / "a", os.O_WRONLY | os.O_CREAT)
    for call in ("open", "write", "rename"):
        control.fail(call, errno.EIO, 1000)
    with pytest.raises(OSError, match="Input/output"):
        os.open(tmp_path / "disk" / "b", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError, match="Input/output"):
        os.open("b", os.O_WRONLY | os.O_CREAT, dir_fd=folder)
    with pytest.raises(OSError, match="Input/output"):
        os.write(file, b"x")
    with pytest.raises(OSError, match="Input/output"):
        (tmp_path / "disk" / "a").rename(tmp_path / "disk" / "c")
    (tmp_path / "other").write_bytes(b"x")
    assert (control.hits("open"), control.hits("write"), control.hits("rename")) == (2, 1, 1)
    control.heal()
    assert os.write(file, b"x") == 1
    os.close(file)
    os.close(folder)


def test_layer_shifts_clock_and_fails_database_as_the_page_sets(
    control: ControlPage, tmp_path: Path
):
    base = sqlite3.connect(tmp_path / "base", isolation_level=None)
    control.fail("sqlite", errno.EIO, 1000)
    with pytest.raises(sqlite3.OperationalError, match="disk I/O"):
        base.execute("BEGIN IMMEDIATE")
    base.execute("CREATE TABLE t (a)")
    control.clock_us = 3_600_000_000
    ahead = time.time_ns() - time.clock_gettime_ns(time.CLOCK_REALTIME)
    assert ahead > 3_500_000_000_000
    control.heal()
    base.execute("BEGIN")
    base.close()


def test_proxy_forwards_and_cuts_connections(socket_folder: Path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(socket_folder / "s"))
        server.listen()
        proxy = ConnectionProxy(socket_folder / "near", socket_folder, ["s"])
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(socket_folder / "near" / "s"))
            client.sendall(b"question")
            answering, _ = server.accept()
            assert answering.recv(8, socket.MSG_WAITALL) == b"question"
            answering.sendall(b"answer")
            assert client.recv(6, socket.MSG_WAITALL) == b"answer"
            assert proxy.connections == 1
            assert proxy.cut() == 1
            assert client.recv(1) == b""
            answering.close()
        proxy.close()
