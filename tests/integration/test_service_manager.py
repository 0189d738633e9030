"""Daemon under a service manager: notifications, reloads and stops."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from rankdump._cli.daemon_client import fetch_agent_status

WAIT_S = 300
ARRAY = np.arange(1000, dtype=np.float32)


class ServiceManager:
    """A service manager that runs a daemon in a folder and receives its notifications."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.public = f"unix:{folder}/agent.sock"
        self.config = folder / "rankdumpd.toml"
        self.heard: list[str] = []
        self._changed = threading.Condition()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(folder / "notify.sock"))
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()
        self.process: subprocess.Popen[bytes] | None = None

    def configure(self, **agent: object) -> None:
        """Write the settings file."""
        own = {"listen": self.public, "state_dir": f"{self.folder}/state", **agent}
        lines = [
            f'{key} = "{v}"' if isinstance(v, str) else f"{key} = {v}" for key, v in own.items()
        ]
        self.config.write_text("\n".join(["[agent]", *lines]) + "\n")

    def run(self, *, program: tuple[str, ...] = ("-m", "rankdumpd"), **environ: str) -> None:
        """Run an agent."""
        command = [sys.executable, *program, "agent"]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--config", str(self.config)],
                stderr=log,
                cwd=self.folder,
                env=os.environ | {"NOTIFY_SOCKET": f"{self.folder}/notify.sock"} | environ,
            )

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait_heard(self, word: str, times: int = 1) -> str:
        """Wait for that many messages that begin with a word; return the last one."""

        def found() -> list[str]:
            return [each for each in self.heard if each.startswith(word)]

        with self._changed:
            said = self._changed.wait_for(lambda: len(found()) >= times, WAIT_S)
        assert said, (self.heard, self.log())
        return found()[times - 1]

    def ends_with(self) -> int:
        """Wait for the end, and return the exit status."""
        assert self.process is not None
        return self.process.wait(WAIT_S)

    def wait_logged(self, text: str, times: int) -> None:
        """Wait until the log has a text that many times."""
        pause = threading.Event()
        assert any(
            self.log().count(text) >= times or pause.wait(0.05) for _ in range(WAIT_S * 20)
        ), self.log()

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def close(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait(WAIT_S)
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        while said := self._socket.recv(4096):
            with self._changed:
                self.heard.append(said.decode())
                self._changed.notify_all()


@pytest.fixture
def manager(short_dir: Path) -> Iterator[ServiceManager]:
    with contextlib.closing(ServiceManager(short_dir)) as manager:
        manager.configure()
        yield manager


def test_watchdog_is_notified_twice_per_period(manager: ServiceManager):
    manager.run(WATCHDOG_USEC="100000")
    assert "STATUS=0 ranks, 0 frames" in manager.wait_heard("READY=1")
    assert "STATUS=0 ranks" in manager.wait_heard("WATCHDOG=1", times=3)
    manager.signal(signal.SIGTERM)
    assert manager.ends_with() == 0, manager.log()
    assert manager.wait_heard("STATUS=drained") == "STATUS=drained, 0 items are left"


@pytest.mark.parametrize("workers", [1, 2])
def test_reload_applies_settings_and_lists_those_that_need_a_restart(
    manager: ServiceManager, workers: int
):
    """A broken file changes nothing, and no rank is affected."""
    manager.configure(workers=workers)
    manager.run()
    manager.wait_heard("READY=1")
    manager.configure(workers=workers, keep_free_bytes=1 << 59, disk_bytes=5, queue_bytes=1 << 28)
    manager.signal(signal.SIGHUP)
    manager.wait_heard("RELOADING=1")
    manager.wait_heard("READY=1", times=2)
    # A worker has a part of some limits, and says for itself what it took over.
    manager.wait_logged("the settings were reloaded", 1 if workers == 1 else 3)
    manager.config.write_text("[agent]\nnonsense = 1\n")
    manager.signal(signal.SIGHUP)
    manager.wait_heard("READY=1", times=3)
    manager.signal(signal.SIGTERM)
    assert manager.ends_with() == 0, manager.log()
    log = manager.log()
    taken = "changed: agent.keep_free_bytes, agent.disk_bytes"
    assert taken in log
    assert "change only with a restart: agent.queue_bytes" in log
    assert "the settings were not reloaded" in log
    assert "agent.nonsense" in log


def test_reloaded_limits_apply_to_new_streams(manager: ServiceManager, make_rank, frames):
    manager.run()
    manager.wait_heard("READY=1")
    manager.configure(keep_free_bytes=1 << 59)
    manager.signal(signal.SIGHUP)
    manager.wait_heard("READY=1", times=2)
    rank = make_rank(manager.public)
    rank.open()
    rank.push().send(frames.record(1, ARRAY), frames.end(2, 0, 1), frames.goodbye(3)).finish()
    (iteration,) = fetch_agent_status(manager.public).iterations
    assert dict(iteration.dropped) == {"disk_low": 1}


STALLED = """
import threading
from rankdumpd.agent import service
from rankdumpd.agent.storage.record_writer import RecordWriter
from rankdumpd.main import main
service._STOP_TIMEOUT_S = 0.2
RecordWriter.write = lambda *_, **_options: threading.Event().wait()
main()
"""


def test_hanging_disk_does_not_block_the_stop(manager: ServiceManager, make_rank, frames):
    """The daemon ends soon after the deadline with status 1, and says how much it leaves behind."""
    manager.configure(drain_timeout_s=0.5)
    manager.run(program=("-c", STALLED))
    rank = make_rank(manager.public)
    rank.open()
    stream = rank.push().send(frames.record(1, ARRAY), frames.record(2, ARRAY))
    pause = threading.Event()
    while fetch_agent_status(manager.public).load.queued_records < 2:
        pause.wait(0.05)
    manager.signal(signal.SIGTERM)
    assert stream.wait_over() is grpc.StatusCode.UNAVAILABLE
    assert stream.acknowledged == 0
    assert manager.ends_with() == 1
    assert "Agent: 2 items are unfinished after 0.5 s" in manager.log()
    assert "the stop does not end" in manager.log()
    assert "rankdumpd-worker-" in manager.log()
    assert "2 frames of" in manager.log()
