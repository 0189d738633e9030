"""A daemon under a service manager: what it is told and says, from the first knock to the end."""

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
from support.worker_host import RankPlace, dump, tensors

from rankdump._cli.daemon_client import fetch_agent_status
from rankdump.errors import ConfigError
from rankdumpd.server.grpc_server import inherit_socket

WAIT_S = 60
ARRAY = np.arange(1000, dtype=np.float32)


class Manager:
    """A service manager: it runs a daemon in a folder and hears what that says."""

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
        """Write the settings."""
        own = {"listen": self.public, "state_dir": f"{self.folder}/state", **agent}
        lines = [
            f'{key} = "{v}"' if isinstance(v, str) else f"{key} = {v}" for key, v in own.items()
        ]
        self.config.write_text("\n".join(["[agent]", *lines]) + "\n")

    def run(
        self,
        held: socket.socket | None = None,
        *,
        program: tuple[str, ...] = ("-m", "rankdumpd"),
        **environ: str,
    ) -> None:
        """Run an agent; with a socket that is held for it, which becomes its descriptor 3."""
        command = [sys.executable, *program, "agent"]
        if held:
            hand_over = 'exec 3<&0 </dev/null; export LISTEN_PID=$$; exec "$@"'
            command = ["sh", "-c", hand_over, "sh", *command]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--config", str(self.config)],
                stdin=held.fileno() if held else None,
                stderr=log,
                cwd=self.folder,
                env=os.environ
                | {"NOTIFY_SOCKET": f"{self.folder}/notify.sock", "LISTEN_FDS": "1"}
                | environ,
            )

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait_heard(self, word: str, times: int = 1) -> str:
        """Return the last of so many messages that begin with a word."""

        def found() -> list[str]:
            return [each for each in self.heard if each.startswith(word)]

        with self._changed:
            said = self._changed.wait_for(lambda: len(found()) >= times, WAIT_S)
        assert said, (self.heard, self.log())
        return found()[times - 1]

    def ends_with(self) -> int:
        """Return the exit status."""
        assert self.process is not None
        return self.process.wait(WAIT_S)

    def wait_logged(self, text: str, times: int) -> None:
        """Wait until a text was logged so often."""
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
def manager(short_dir: Path) -> Iterator[Manager]:
    with contextlib.closing(Manager(short_dir)) as manager:
        manager.configure()
        yield manager


def test_signs_of_life_come_twice_as_often_as_the_watchdog_wants(manager: Manager):
    manager.run(WATCHDOG_USEC="100000")
    assert "STATUS=0 ranks, 0 frames" in manager.wait_heard("READY=1")
    assert "STATUS=0 ranks" in manager.wait_heard("WATCHDOG=1", times=3)
    manager.signal(signal.SIGTERM)
    assert manager.ends_with() == 0, manager.log()
    assert manager.wait_heard("STATUS=drained") == "STATUS=drained, 0 items are left"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_reload_takes_over_what_it_may_and_names_the_rest(manager: Manager, workers: int):
    """A broken file changes nothing, and ranks notice none of it."""
    manager.configure(workers=workers)
    manager.run()
    manager.wait_heard("READY=1")
    manager.configure(workers=workers, keep_free_bytes=1 << 59, disk_bytes=5, queue_bytes=1 << 28)
    manager.signal(signal.SIGHUP)
    manager.wait_heard("RELOADING=1")
    manager.wait_heard("READY=1", times=2)
    # A worker has a part of some limits, and says for itself what it took over.
    manager.wait_logged("settings were read again", 1 if workers == 1 else 3)
    manager.config.write_text("[agent]\nnonsense = 1\n")
    manager.signal(signal.SIGHUP)
    manager.wait_heard("READY=1", times=3)
    manager.signal(signal.SIGTERM)
    assert manager.ends_with() == 0, manager.log()
    log = manager.log()
    taken = "changed: agent.keep_free_bytes, agent.disk_bytes"
    assert taken in log
    assert "only a new start changes agent.queue_bytes" in log
    assert "the settings stay as they are" in log
    assert "agent.nonsense" in log


def test_limits_hold_for_the_streams_that_come(manager: Manager, make_rank, frames):
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


@pytest.fixture
def held(short_dir: Path) -> Iterator[socket.socket]:
    """The public socket, which stays open while agents come and go."""
    with socket.socket(socket.AF_UNIX) as held:
        held.bind(str(short_dir / "agent.sock"))
        held.listen()
        yield held


def test_who_knocks_first_is_sent_to_the_worker_beside(
    manager: Manager, held: socket.socket, make_rank, frames
):
    """A rank may come before the agent; its frames do not pass the socket that is held."""
    manager.configure(workers=2)
    rank = make_rank(manager.public)
    manager.run(held)
    redirect = rank.open().redirect
    assert redirect.startswith("agent.sock.direct")
    direct = make_rank(f"unix:{manager.folder}/{redirect}")
    assert direct.open().token
    stream = direct.push().send(frames.record(1, ARRAY), frames.end(2, 0, 1), frames.goodbye(3))
    assert stream.finish() is grpc.StatusCode.OK
    assert [i.stored for i in fetch_agent_status(manager.public).iterations] == [1]
    manager.signal(signal.SIGTERM)
    assert manager.ends_with() == 0, manager.log()


def test_who_knocks_while_no_agent_runs_is_served_by_the_next(
    manager: Manager, held: socket.socket
):
    """The socket outlives the agent, and nobody is refused."""
    for _ in range(2):
        with grpc.insecure_channel(manager.public) as channel:
            knocking = grpc.channel_ready_future(channel)
            manager.run(held)
            knocking.result(WAIT_S)
        manager.signal(signal.SIGTERM)
        assert manager.ends_with() == 0, manager.log()


def test_a_session_over_a_held_socket(
    manager: Manager, held: socket.socket, make_rank, short_dir: Path
):
    """A real rank is sent to the socket beside and follows; its tensors are in the tree."""
    manager.run(held)
    place = RankPlace(short_dir)
    assert make_rank(manager.public).open().redirect == "agent.sock.direct"
    with place.session(0) as session:
        session.step(0)
        dump(session, tensors(0, 0, 10))
    np.testing.assert_array_equal(place.arrays(0), tensors(0, 0, 10))


def test_what_cannot_be_served_is_one_line(manager: Manager, short_dir: Path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(short_dir / "other.sock"))
        manager.run(other)
        assert manager.ends_with() == 2
    assert "a Unix socket with a path, listening" in manager.log()
    assert manager.log().count("\n") == 1


def test_sockets_of_another_process_are_not_ours():
    """Nor are several: which one would be the public one?"""
    own = str(os.getpid())
    for environ in ({}, {"LISTEN_FDS": "1"}, {"LISTEN_FDS": "1", "LISTEN_PID": "1"}):
        assert inherit_socket(environ) is None
    with pytest.raises(ConfigError, match="one socket"):
        inherit_socket({"LISTEN_FDS": "2", "LISTEN_PID": own})


STALLED = """
import threading
from rankdumpd.agent import service
from rankdumpd.agent.storage.record_writer import RecordWriter
from rankdumpd.main import main
service._STOP_TIMEOUT_S = 0.2
RecordWriter.write = lambda *_: threading.Event().wait()
main()
"""


def test_a_disk_that_hangs_does_not_hold_the_stop(manager: Manager, make_rank, frames):
    """It ends soon after the deadline, says how much it leaves, and leaves with status 1."""
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
    assert "Agent: 2 items unfinished after 0.5 s" in manager.log()
    assert "the stop does not end" in manager.log()
    assert "rankdumpd-worker-" in manager.log()
    assert "2 frames of" in manager.log()
