"""`rankdumpd standalone` as a process: start, signals, crashes and restarts."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rankdump._core.manifest import Manifest
from rankdump._core.plan import ContentSettings
from rankdump.wire.v1 import coordinator_pb2, coordinator_pb2_grpc
from rankdumpd.agent.ledger.database import lock_ledger_folder

ARRAY = np.arange(1000, dtype=np.float32)
WAIT_S = 300


def rankdumpd(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rankdumpd", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environ, timeout=WAIT_S
    )


def tensors(root: Path) -> list[Path]:
    return sorted((root / "rank_0" / "Net").rglob("*.npy*"))


def test_sigterm_drains_streams_and_queue(make_daemon, make_rank, frames):
    """A rank that is told of the end finishes its stream, nothing is lost, and the exit
    code is 0.
    """
    daemon = make_daemon()
    rank = make_rank(daemon.address)
    rank.open()
    stream = rank.push().send(frames.record(1, ARRAY))
    stream.wait_acknowledged(1)
    daemon.terminate()
    stream.wait_draining()
    stream.send(*[frames.record(n, ARRAY) for n in range(2, 101)], frames.end(101, 0, 100))
    stream.wait_acknowledged(101)
    other = make_rank(daemon.address, session_id="late", job_id="late")
    with pytest.raises(grpc.RpcError) as refused:
        other.open()
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert stream.finish() is grpc.StatusCode.OK
    assert daemon.exit_status() == 0, daemon.log()
    assert len(tensors(rank.root)) == 100
    assert not (daemon.folder / "d.sock").exists()


def test_silent_rank_is_cut_off_at_the_drain_deadline(make_daemon, make_rank, frames):
    """The stream of a rank that does not react is ended at the deadline; its frames are
    committed.
    """
    daemon = make_daemon(RANKDUMPD_AGENT__DRAIN_TIMEOUT_S="1")
    rank = make_rank(daemon.address)
    rank.open()
    stream = rank.push().send(frames.record(1, ARRAY))
    stream.wait_acknowledged(1)
    daemon.terminate()
    assert stream.wait_over() is grpc.StatusCode.UNAVAILABLE
    assert daemon.exit_status() == 0, daemon.log()
    assert len(tensors(rank.root)) == 1


def test_second_signal_ends_the_daemon_at_once(make_daemon, make_rank, frames):
    """The second signal does not wait for ranks."""
    daemon = make_daemon()
    rank = make_rank(daemon.address)
    rank.open()
    stream = rank.push().send(frames.record(1, ARRAY))
    stream.wait_acknowledged(1)
    daemon.terminate()
    stream.wait_draining()
    daemon.process.send_signal(signal.SIGINT)
    assert daemon.exit_status() == 1
    stream.wait_over()


def test_killed_daemon_resumes_on_its_state(make_daemon, make_rank, frames):
    """After kill -9 a new daemon on the same state and socket continues from the ledger."""
    daemon = make_daemon()
    rank = make_rank(daemon.address)
    rank.open()
    stream = rank.push().send(*[frames.record(n, ARRAY + n) for n in range(1, 31)])
    stream.wait_acknowledged(10)
    daemon.kill()
    assert stream.wait_over() is grpc.StatusCode.UNAVAILABLE
    assert (daemon.folder / "d.sock").exists()
    daemon.start()
    acknowledged = rank.open().acknowledged_sequence
    assert acknowledged >= stream.acknowledged
    stream = rank.push().send(*[frames.record(n, ARRAY + n) for n in range(acknowledged + 1, 41)])
    stream.send(frames.end(41, 0, 40), frames.goodbye(42))
    assert stream.finish() is grpc.StatusCode.OK
    assert len(tensors(rank.root)) == 40
    folder = rank.root / "rank_0" / ".dump_metadata" / "manifest"
    (manifest,) = [Manifest.from_json(path.read_bytes()) for path in folder.iterdir()]
    assert manifest.status.is_balanced
    assert sorted(rank.root / record.path for record in manifest.records) == tensors(rank.root)
    assert not list(rank.root.rglob(".*.tmp"))


def test_killed_daemon_remembers_the_outcome_of_each_row(make_daemon, make_rank, frames):
    """Rows of statistics are counted, written and listed once, and dropped rows stay dropped."""
    daemon = make_daemon()
    rank = make_rank(daemon.address, content=ContentSettings("statistic", ("max",)))
    rank.open()
    row, refused = (ARRAY, "1"), (ARRAY.astype(np.complex64), "1")
    sent = [frames.figures(n, [row, refused, row], iteration=n) for n in range(1, 31)]
    stream = rank.push().send(*sent)
    stream.wait_acknowledged(10)
    daemon.kill()
    stream.wait_over()
    daemon.start()
    rank.open()
    ends = [frames.end(30 + n, n, 3) for n in range(1, 31)]
    assert rank.push().send(*sent, *ends).finish() is grpc.StatusCode.OK
    found = rank.status().iterations
    assert [(each.stored, dict(each.dropped)) for each in found] == [(2, {"no_statistics": 1})] * 30
    tables = [path.read_text() for path in rank.root.rglob("statistic.csv")]
    assert [text.count("\n") for text in tables] == [3] * 30
    assert all("\nMatMul" in text for text in tables)


def test_standalone_agent_reports_through_its_own_socket(make_daemon, make_rank, frames):
    """A standalone daemon's agent reports sessions and balances to its own coordinator."""
    daemon = make_daemon()
    rank = make_rank(daemon.address)
    rank.open()
    stream = rank.push().send(frames.record(1, ARRAY), frames.end(2, 0, 1), frames.goodbye(3))
    stream.finish()
    assert rank.drain().drained
    stub = coordinator_pb2_grpc.CoordinatorServiceStub(rank.channel)
    view = stub.Status(coordinator_pb2.CoordinatorStatusRequest()).view
    assert [session.session_id for session in view.sessions] == [rank.session_id]
    assert [(i.complete, i.expected, i.stored) for i in view.iterations] == [(True, 1, 1)]
    # Its stub file knows the class but not the calls.
    reflection: Any = reflection_pb2_grpc.ServerReflectionStub(rank.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = reflection.ServerReflectionInfo(iter([request]))
    names = {service.name for service in answer.list_services_response.service}
    assert {"rankdump.wire.v1.AgentService", "rankdump.wire.v1.CoordinatorService"} <= names


def test_address_of_a_live_server_is_rejected(make_daemon, tmp_path):
    """A second daemon on the same socket ends with an error and does not disturb the first one."""
    daemon = make_daemon()
    path = daemon.address.removeprefix("unix:")
    second = rankdumpd("standalone", "--socket", path, "--state-dir", str(tmp_path))
    assert second.returncode == 1
    assert "has the slabs of another agent" in second.stderr
    daemon.wait_serving()


def test_state_folder_of_a_live_agent_is_rejected(make_daemon, short_dir):
    """A second daemon on the same state folder ends with one line."""
    make_daemon()
    state = str(short_dir / "state")
    second = rankdumpd("standalone", "--socket", f"{short_dir}/2.sock", "--state-dir", state)
    assert second.returncode == 1
    assert "used by another agent" in second.stderr
    assert second.stderr.count("\n") == 1


def test_readiness_is_notified_to_systemd(make_daemon, short_dir):
    """READY=1 is sent when calls are answered, STOPPING=1 when the stop begins."""
    heard: list[bytes] = []

    def listen() -> None:
        # On a slow machine the agent reports its status in between.
        while b"STOPPING=1" not in heard:
            heard.append(notify.recv(64).split(b"\n")[0])

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(short_dir / "n.sock"))
        notify.settimeout(WAIT_S)
        listener = threading.Thread(target=listen)
        listener.start()
        daemon = make_daemon(NOTIFY_SOCKET=str(short_dir / "n.sock"))
        daemon.terminate()
        assert daemon.exit_status() == 0, daemon.log()
        listener.join(WAIT_S)
    assert (heard[0], heard[-1]) == (b"READY=1", b"STOPPING=1")


class TestCommand:
    def test_check_config_prints_the_effective_settings(self, tmp_path):
        """--check-config shows the resolved settings and starts nothing."""
        done = rankdumpd(
            "standalone", "--check-config", "--socket", str(tmp_path / "s"), PATH="/usr/bin"
        )
        assert done.returncode == 0, done.stderr
        assert f'listen = "unix:{tmp_path}/s"' in done.stdout
        assert "queue_bytes = 536870912" in done.stdout

    @pytest.mark.parametrize(
        ("command", "text", "says"),
        [
            ("agent", "[agent]\nworker = 1\n", "nearest: workers"),
            ("agent", '[agent]\nlisten = "0.0.0.0:7420"\n', "with certificates"),
            ("standalone", '[agent]\nlisten = "127.0.0.1:0"\n', "the agent reports to"),
            ("coordinator", '[coordinator]\nlisten = "10.0.0.1:1"\n', "with certificates"),
            ("coordinator", '[coordinator]\nlisten = "unix:relative"\n', "absolute"),
        ],
    )
    def test_configuration_error_is_one_line(self, tmp_path, command, text, says):
        """An error in the settings is one line on stderr, with exit code 2."""
        path = tmp_path / "rankdumpd.toml"
        path.write_text(text)
        section = "COORDINATOR" if command == "coordinator" else "AGENT"
        environ = {f"RANKDUMPD_{section}__STATE_DIR": str(tmp_path / "state")}
        done = rankdumpd(command, "--config", str(path), **environ)
        assert done.returncode == 2
        assert says in done.stderr
        assert done.stderr.count("\n") == 1

    def test_error_that_ends_a_daemon_is_in_its_log(self, tmp_path):
        """In the configured form, with a priority where journald reads it."""
        lock = lock_ledger_folder(tmp_path / "state")
        environ = {
            "RANKDUMPD_AGENT__STATE_DIR": str(tmp_path / "state"),
            "RANKDUMPD_AGENT__LISTEN": "127.0.0.1:0",
            "RANKDUMPD_LOG__FORMAT": "json",
        }
        command = [sys.executable, "-m", "rankdumpd", "agent"]
        with (tmp_path / "log").open("wb") as log:
            place = os.fstat(log.fileno())
            environ["JOURNAL_STREAM"] = f"{place.st_dev}:{place.st_ino}"
            done = subprocess.run(command, stderr=log, check=False, env=environ, timeout=WAIT_S)
        os.close(lock)
        assert done.returncode == 1
        *_, last = (tmp_path / "log").read_text().splitlines()
        found = json.loads(last.removeprefix("<2>"))
        assert last.startswith("<2>")
        assert found["level"] == "critical"
        assert found["message"] == f"agent.state_dir: {tmp_path}/state is used by another agent"

    def test_version_is_printed(self):
        done = rankdumpd("--version")
        assert (done.returncode, done.stderr) == (0, "")
        first, kernels = done.stdout.splitlines()
        assert first == f"rankdumpd, version {version('rankdump')}"
        assert kernels.startswith("kernels: ")

    def test_health_reports_whether_a_daemon_serves(self, make_daemon, short_dir):
        """For probes: exit code 0 without output, or 1 with one line."""
        address = f"unix:{short_dir}/d.sock"
        done = rankdumpd("health", address)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert done.stderr.startswith(f"rankdumpd: {address}: ")
        make_daemon()
        done = rankdumpd("health", address)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    def test_unknown_command_is_a_usage_error(self):
        """The exit code is 2."""
        assert rankdumpd("serve").returncode == 2
