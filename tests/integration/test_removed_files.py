"""Removal of files of a running daemon: reported in log, status and health."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.slab_agents import wait_until

from rankdumpd.server.state_files import RequiredFiles


def health_of(channel: grpc.Channel) -> int:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return stub.Check(health_pb2.HealthCheckRequest(), timeout=60).status


@pytest.mark.parametrize("what", ["state", "d.sock"])
def test_removed_files_are_reported_and_connected_ranks_continue(
    make_daemon, make_rank, frames, short_dir, what
):
    """The daemon checks every two seconds; an open channel still reaches it."""
    daemon = make_daemon()
    rank = make_rank(daemon.address)
    rank.open()
    stream = rank.push().send(frames.record(1, np.ones(3)))
    stream.wait_acknowledged(1)
    states = health_pb2.HealthCheckResponse
    assert health_of(rank.channel) == states.SERVING
    assert not rank.status().findings
    path = short_dir / what
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    wait_until(lambda: health_of(rank.channel) == states.NOT_SERVING)
    said = [
        text for text in rank.status().findings if "was removed while this process runs" in text
    ]
    assert said
    assert str(path) in said[0]
    for text in said:
        assert daemon.log().count(text) == 1
    stream.send(frames.record(2, np.ones(3))).wait_acknowledged(2)
    stream.cut()  # a daemon that ends waits for ranks that are connected
    daemon.terminate()
    assert daemon.exit_status() == 0, daemon.log()


class TestRequiredFiles:
    def test_restored_file_clears_the_finding(self, tmp_path: Path):
        """The file is recognised by its identity: another one of the same name does not count."""
        required, file = RequiredFiles(), tmp_path / "a"
        file.write_bytes(b"")
        required.watch_file(file, "nothing works")
        assert required.find_missing() == ()
        file.rename(tmp_path / "b")
        (said,) = required.find_missing()
        assert said.endswith(
            f"{file} was removed while this process runs: nothing works; restart the process"
        )
        file.write_bytes(b"")
        assert "was replaced" in required.find_missing()[0]
        (tmp_path / "b").rename(file)
        assert required.find_missing() == required.missing == ()
