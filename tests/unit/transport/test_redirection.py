"""Redirects: one step, relative to the known address, and anew at every connection."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from support.agent_double import RunningFakeAgent, introduction_of, plan
from support.record_heads import head_of

from rankdump._core.record import TensorKey, TensorSide
from rankdump._core.recorder_protocol import StagedRecord
from rankdump._transport.agent_client import AgentClient, resolve_redirect
from rankdump._transport.send_buffer import LinkState, SendBuffer
from rankdump.errors import ProtocolError


@pytest.mark.parametrize(
    ("address", "redirect", "found"),
    [
        ("unix:/run/rankdump/agent.sock", "agent.sock.1", "unix:/run/rankdump/agent.sock.1"),
        ("unix:///mnt/elsewhere/agent.sock", "agent.sock.1", "unix:///mnt/elsewhere/agent.sock.1"),
        ("unix:agent.sock", "agent.sock.1", "unix:agent.sock.1"),
        ("127.0.0.1:7420", "41321", "127.0.0.1:41321"),
        ("[::1]:7420", "41321", "[::1]:41321"),
        ("dns:///localhost:7420", "41321", "dns:///localhost:41321"),
    ],
)
def test_resolve_redirect_is_beside_the_known_address(address, redirect, found):
    assert resolve_redirect(address, redirect) == found


@pytest.mark.parametrize(
    ("address", "redirect"),
    [
        ("unix:/run/a.sock", "../a.sock"),
        ("unix:/run/a.sock", "/etc/a.sock"),
        ("unix:/run/a.sock", ".."),
        ("127.0.0.1:7420", "example.org:1"),
        ("127.0.0.1:7420", "70000"),
        ("127.0.0.1:7420", "0"),
        ("127.0.0.1:7420", "²"),
        ("127.0.0.1:7420", "agent.sock.1"),
    ],
)
def test_resolve_redirect_rejects_other_places(address, redirect):
    with pytest.raises(ProtocolError, match="not beside it"):
        resolve_redirect(address, redirect)


class RedirectedClient:
    """A client that records the states of its connection."""

    def __init__(self, address: str, folder: Path) -> None:
        self.said: list[str] = []
        self.up = threading.Event()
        self.buffer = SendBuffer(on_release=lambda _: None, on_copy_failed=lambda _: None)
        self.client = AgentClient(
            introduction_of(plan(folder)),
            self.buffer,
            address,
            on_tick=lambda: None,
            on_warning=lambda _: None,
            on_link_change=self._note,
            on_slab_unused=lambda _reason: None,
        )

    def _note(self, link: LinkState, reason: str) -> None:
        self.said.append(reason)
        if link is LinkState.UP:
            self.up.set()

    def submit(self, stamp: int) -> None:
        key = TensorKey(0, "Net", 0, 0, stamp, "Add", "Default/Add-op0", TensorSide.INPUT, 0)
        data = memoryview(np.full(4, stamp, np.uint8).tobytes())
        self.buffer.submit(StagedRecord(head_of(key, "uint8", (4,), 4), data))


def test_client_connects_to_the_known_address_first(
    running: RunningFakeAgent, address: str, tmp_path
):
    """The supervisor decides anew after each cut; nothing is lost on the way."""
    worker = RunningFakeAgent(f"{address}.1")
    try:
        running.agent.redirect = "a.sock.1"
        worker.agent.cut_after = 4
        sender = RedirectedClient(address, tmp_path)
        sender.client.start(5)
        for stamp in range(10):
            sender.submit(stamp)
        assert sender.client.close(10) == 0
        assert {f.record.timestamp_us for f in worker.agent.frames} == set(range(10))
        assert len(running.agent.opened) == len(worker.agent.opened) >= 2
        assert running.agent.frames == []
    finally:
        worker.stop()


def test_client_retries_a_worker_that_is_away(running: RunningFakeAgent, address: str, tmp_path):
    running.agent.redirect = "a.sock.1"
    sender = RedirectedClient(address, tmp_path)
    sender.client.start(5)
    assert sender.client.link is LinkState.ABSENT
    sender.submit(1)
    worker = RunningFakeAgent(f"{address}.1")
    try:
        assert sender.up.wait(30)
        assert sender.client.close(10) == 0
    finally:
        worker.stop()


def test_client_rejects_a_second_redirect(running: RunningFakeAgent, address: str, tmp_path):
    """Otherwise two agents could redirect a rank to each other for ever."""
    worker = RunningFakeAgent(f"{address}.1")
    try:
        running.agent.redirect = worker.agent.redirect = "a.sock.1"
        sender = RedirectedClient(address, tmp_path)
        sender.client.start(5)
        assert sender.client.link is LinkState.REJECTED
        assert "to an agent that redirected to" in sender.said[-1]
        assert sender.client.close(1) == 0
    finally:
        worker.stop()
