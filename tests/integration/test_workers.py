"""Agent with several worker processes: distribution of ranks, crashes and restarts."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.worker_host import WAIT_S, WorkerHost, dump, tensors, wait_gone, watch

from rankdump._cli.daemon_client import drain_agent, fetch_agent_status, set_job_pin
from rankdump._core.status import SessionState, StatusView
from rankdump._embedded_daemon import is_daemon_serving
from rankdump.wire.v1 import agent_pb2, coordinator_pb2, coordinator_pb2_grpc
from rankdumpd.workers.session_migration import select_worker

Hosts = Callable[..., WorkerHost]


@pytest.fixture
def make_host(short_dir: Path) -> Iterator[Hosts]:
    with contextlib.ExitStack() as stack:

        def make(workers: int = 2, **settings: str) -> WorkerHost:
            host = WorkerHost(short_dir, workers, **settings)
            stack.callback(host.close)
            return host

        yield make


def until(look: Callable[[], StatusView], holds: Callable[[StatusView], bool]) -> StatusView:
    """Return the first view for which a condition is true; each look is a call."""
    view = look()
    deadline = time.monotonic() + WAIT_S
    while not holds(view):
        assert time.monotonic() < deadline, view
        view = look()
    return view


def test_ranks_are_distributed_and_all_tensors_are_in_the_tree(make_host):
    """The tree has the tensors of every rank, whichever worker wrote them, and the view has all
    ranks.
    """
    host = make_host(2)
    for rank in range(4):
        with host.session(rank) as session:
            for iteration in range(2):
                session.step(iteration)
                dump(session, tensors(rank, 50 * iteration, 50))
    assert drain_agent(host.address, timeout_s=WAIT_S) == 0
    view = host.view()
    assert {s.rank: s.state for s in view.sessions} == dict.fromkeys(range(4), SessionState.CLOSED)
    assert all(i.complete and i.is_balanced and i.stored == 50 for i in view.iterations)
    assert len(view.iterations) == 8
    assert view.roots == (str(host.tree),)
    assert view.findings == ()
    assert view.load.disk_total_bytes > 0
    for rank in range(4):
        np.testing.assert_array_equal(host.arrays(rank), tensors(rank, 0, 100))
        assert all(manifest.status.is_balanced for manifest in host.manifests(rank))
    set_job_pin(host.address, "job", pinned=True)
    (usage,) = host.view().usage
    assert usage.pinned
    assert usage.bytes_stored == sum(i.bytes_stored for i in view.iterations)
    for index in range(2):
        own = fetch_agent_status(f"{host.address}.{index}")
        assert [job.pinned for job in own.usage] == [True]
        expected = {rank for rank in range(4) if select_worker("job", rank, 2) == index}
        assert {s.rank for s in own.sessions} == expected
        assert len(expected) == 2


def all_is_needed(view: StatusView) -> bool:
    """Return whether all four ranks have ended and the view has their needs, which come later."""
    stored = sum(i.bytes_stored for i in view.iterations if i.complete)
    needs = [need.bytes_stored for need in view.needs]
    return sum(i.complete for i in view.iterations) == 4 and needs == [stored]


def test_needs_and_ledgers_of_workers_are_added_up(make_host, short_dir):
    """There is one sentence for all ranks, not one for each worker."""
    host = make_host(2, JOB_BYTES="150000", KEEP_FREE_RATIO="0", KEEP_FREE_INODES_RATIO="0")
    with contextlib.ExitStack() as sessions:
        for rank in range(4):
            session = sessions.enter_context(host.session(rank))
            session.step(0)
            dump(session, tensors(rank, 0, 50))
            session.step(1)
        view = until(host.view, all_is_needed)
        (need,) = view.needs
        (said,) = view.findings
        assert said.startswith("job job: each iteration needs ")
        assert said.endswith(f"{(150_000 - need.bytes_stored) // need.bytes_stored} more fit")
        assert view.ledger.folder == str(short_dir / "state")
        assert view.ledger.used_bytes > 0


@pytest.mark.parametrize("shared_memory", [True, False])
def test_killed_worker_restarts_and_its_rank_loses_nothing(make_host, shared_memory):
    """Acknowledged frames are in the ledger of the worker, others are resent or in the slab."""
    host = make_host(2)
    index = select_worker("job", 3, 2)
    with host.session(3, shared_memory=shared_memory) as session:
        session.step(0)
        dump(session, tensors(3, 0, 200))
        (watched,) = watch([host.worker(index)])
        os.kill(host.worker(index), signal.SIGKILL)
        dump(session, tensors(3, 200, 200))
        wait_gone([watched])
        dump(session, tensors(3, 400, 200))
    np.testing.assert_array_equal(host.arrays(3), tensors(3, 0, 600))
    (manifest,) = host.manifests(3)
    assert manifest.status.is_balanced
    assert manifest.status.stored == 600
    finding = f"worker {index} was restarted once; the last process was ended by signal 9"
    assert finding in host.view().findings
    assert host.stop() == 0, host.log()


def test_absent_worker_is_reported_and_others_continue(make_host):
    host = make_host(2)
    with host.session(0) as session:
        session.step(0)
        dump(session, tensors(0, 0, 10))
        other = 1 - select_worker("job", 0, 2)
        os.kill(host.worker(other), signal.SIGKILL)
        view = until(host.view, lambda view: bool(view.findings))
        assert [s.rank for s in view.sessions] == [0]
        assert any(f.startswith(f"worker {other} ") for f in view.findings)
        until(host.view, lambda view: any("was restarted once" in f for f in view.findings))
    assert drain_agent(host.address, timeout_s=WAIT_S) == 0


def test_killed_supervisor_leaves_no_process_and_is_succeeded(make_host):
    host = make_host(2)
    with host.session(1) as session:
        session.step(0)
        dump(session, tensors(1, 0, 100))
        host.kill_all()
        dump(session, tensors(1, 100, 100))
        host.start(2)
        dump(session, tensors(1, 200, 100))
    np.testing.assert_array_equal(host.arrays(1), tensors(1, 0, 300))
    assert host.manifests(1)[0].status.is_balanced


def test_supervisor_waits_for_workers_of_a_killed_one(make_host):
    """The next supervisor waits for the ledgers that dying workers still hold."""
    host = make_host(2)
    watches = watch(host.workers().values())
    host.process.kill()
    host.process.wait(WAIT_S)
    host.start(2)
    wait_gone(watches)
    assert len(host.workers()) == 2


def test_sigterm_drains_all_workers(make_host):
    """Ranks end their streams, their frames are committed, and only the state remains."""
    host = make_host(2)
    with contextlib.ExitStack() as sessions:
        for rank in range(2):
            session = sessions.enter_context(host.session(rank))
            session.step(0)
            dump(session, tensors(rank, 0, 500))
        watches = watch(host.workers().values())
        assert host.stop() == 0, host.log()
        wait_gone(watches)
        assert "unfinished" not in host.log()
        assert not list(host.folder.glob("agent.sock*"))
        host.start(2)
    for rank in range(2):
        np.testing.assert_array_equal(host.arrays(rank), tensors(rank, 0, 500))
    assert host.stop() == 0
    # The slabs went with the sessions.
    assert not list(host.folder.glob("worker-*"))


def test_sigterm_to_every_process_drains_as_usual(make_host):
    """A worker that gets both the signal and the end of the pipe drains once."""
    host = make_host(2)
    with host.session(0) as session:
        session.step(0)
        dump(session, tensors(0, 0, 100))
        for pid in (*host.workers().values(), host.process.pid):
            os.kill(pid, signal.SIGTERM)
        assert host.process.wait(WAIT_S) == 0, host.log()
        assert "stopping at once" not in host.log()
        host.start(2)
    np.testing.assert_array_equal(host.arrays(0), tensors(0, 0, 100))


def test_silent_rank_is_cut_off_at_the_deadline(make_host, make_rank, frames):
    host = make_host(2, DRAIN_TIMEOUT_S="1")
    front = make_rank(host.address)
    rank = make_rank(f"unix:{host.folder}/{front.open().redirect}", root=host.tree)
    rank.open()
    stream = rank.push().send(frames.record(1, np.ones(4, np.float32)))
    stream.wait_acknowledged(1)
    host.process.send_signal(signal.SIGTERM)
    assert stream.wait_over() is grpc.StatusCode.UNAVAILABLE
    assert host.process.wait(WAIT_S) == 0


def test_readiness_is_notified_when_all_workers_serve(make_host, short_dir):
    """The service manager is notified by the supervisor only, when every worker serves."""
    heard: list[bytes] = []
    served: list[bool] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(short_dir / "n.sock"))
        notify.settimeout(WAIT_S)

        def listen() -> None:
            heard.append(notify.recv(64))
            served.extend(is_daemon_serving(f"unix:{short_dir}/agent.sock.{n}") for n in range(3))
            heard.append(notify.recv(64))

        listener = threading.Thread(target=listen)
        listener.start()
        os.environ["NOTIFY_SOCKET"] = str(short_dir / "n.sock")
        try:
            host = make_host(3)
        finally:
            del os.environ["NOTIFY_SOCKET"]
        # What it says when it stops comes after all that its workers could have said.
        assert until_served(served)
        assert host.stop() == 0
        listener.join(WAIT_S)
    assert [said.split(b"\n")[0] for said in heard] == [b"READY=1", b"STOPPING=1"]
    assert served == [True] * 3


def until_served(served: list[bool]) -> bool:
    """Wait until the listener has served three calls; return whether it has."""
    pause = threading.Event()
    return any(len(served) == 3 or pause.wait(0.05) for _ in range(1000))


def test_supervisor_rejects_frames_with_the_reason(make_host, make_rank):
    """The error tells a client that follows no redirect that it is too old."""
    rank = make_rank(make_host(2).address)
    answer = rank.open()
    assert not answer.token
    assert answer.redirect == f"agent.sock.{select_worker('job', 0, 2)}"
    stream = rank.push()
    assert stream.wait_over() is grpc.StatusCode.FAILED_PRECONDITION
    assert "follows no redirect" in stream.details
    with pytest.raises(grpc.RpcError) as refused:
        rank.stub.Control(agent_pb2.ControlRequest())
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_standalone_coordinator_gets_reports_of_all_workers(make_host):
    """With `standalone --workers N` workers report to the address that ranks use."""
    host = make_host(2, command="standalone")
    for rank in range(2):
        with host.session(rank, ranks=2) as session:
            session.step(0)
            dump(session, tensors(rank, 0, 5))
    assert drain_agent(host.address, timeout_s=WAIT_S) == 0
    with grpc.insecure_channel(host.address) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        view = stub.Status(coordinator_pb2.CoordinatorStatusRequest()).view
        assert sorted(s.rank for s in view.sessions) == [0, 1]
        assert sum(i.stored for i in view.iterations) == 10
        # Its stub file knows the class but not the calls.
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = reflection.ServerReflectionInfo(iter([request]))
    names = {service.name for service in answer.list_services_response.service}
    assert {"rankdump.wire.v1.AgentService", "rankdump.wire.v1.CoordinatorService"} <= names
    assert host.stop() == 0, host.log()


def test_worker_over_tcp_has_its_own_port(make_host, make_rank, frames):
    """The client connects to another port of the host by which it knows the agent."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    host = make_host(2, address=f"127.0.0.1:{port}")
    host.address = f"localhost:{port}"
    with host.session(0) as session:
        session.step(0)
        dump(session, tensors(0, 0, 20))
    np.testing.assert_array_equal(host.arrays(0), tensors(0, 0, 20))
    assert host.stop() == 0


def refused(*arguments: str, **environ: str) -> str:
    return failed(2, *arguments, **environ)


def failed(status: int, *arguments: str, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "rankdumpd", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environ},
        timeout=WAIT_S,
    )
    assert done.returncode == status, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("workers", "says"), [("0", "1 to 256"), ("-1", "1 to 256"), ("257", "1 to 256"), ("x", "int")]
)
def test_invalid_number_of_workers_is_one_line(workers, says):
    """The line has the allowed numbers, and nothing is started."""
    assert says in refused("agent", "--workers", workers)


def test_faults_shared_by_workers_are_one_line(tmp_path, short_dir):
    """Errors in settings that all workers share are reported before any worker starts."""
    state = {"RANKDUMPD_AGENT__STATE_DIR": str(tmp_path), "RANKDUMPD_AGENT__WORKERS": "2"}
    name = "x" * (107 - len(f"{short_dir}/"))  # a front could listen there, no worker beside it
    group = refused("agent", RANKDUMPD_AGENT__RUNTIME_GROUP="no such group", **state)
    long = refused("agent", RANKDUMPD_AGENT__LISTEN=f"unix:{short_dir}/{name}", **state)
    queue = refused("agent", RANKDUMPD_AGENT__QUEUE_BYTES=str(1 << 20), **state)
    assert "a group of this host" in group
    assert "107 bytes" in long
    assert "2097152" in queue
    assert {group.count("\n"), long.count("\n"), queue.count("\n")} == {1}


@pytest.mark.parametrize("workers", ["1", "2"])
def test_state_of_a_live_supervisor_is_rejected(make_host, short_dir, workers):
    host = make_host(2)
    said = failed(
        1,
        "agent",
        "--workers",
        workers,
        RANKDUMPD_AGENT__STATE_DIR=f"{short_dir}/state",
        RANKDUMPD_AGENT__LISTEN=f"unix:{short_dir}/other.sock",
    )
    assert "is used by another agent" in said
    assert said.count("\n") == 1
    assert is_daemon_serving(host.address)
