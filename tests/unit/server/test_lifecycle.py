"""Signals, service manager, start, drain and stop of a process."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rankdump.errors import ConfigError
from rankdumpd.server import lifecycle
from rankdumpd.server.grpc_server import GrpcServer
from rankdumpd.server.lifecycle import (
    LIVENESS_INTERVAL_S,
    Component,
    ProcessRequest,
    ServiceManagerNotifier,
    SignalWaiter,
)
from rankdumpd.settings import AgentSettings, DaemonSettings, LogSettings, adopt_settings


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_waiter_returns_earlier_signal(number):
    waiter = SignalWaiter()
    try:
        os.kill(os.getpid(), number)
        waiter.wait()
    finally:
        waiter.close()


def test_signal_waiter_wakes_for_signal_in_other_thread():
    """The kernel may deliver a signal to any thread."""
    waiter = SignalWaiter()
    ready, done = threading.Event(), threading.Event()

    def other() -> None:
        ready.set()
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        done.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        ready.wait(60)
        waiter.wait()
    finally:
        done.set()
        thread.join()
        waiter.close()


@pytest.mark.parametrize("first", ["leash", "signal"])
def test_signal_waiter_counts_pipe_request_and_signal_once(first):
    """A service manager may signal a worker whose supervisor has just requested a drain."""
    waiter = SignalWaiter()
    try:
        if first == "leash":
            waiter.request()
        os.kill(os.getpid(), signal.SIGTERM)
        waiter.request()
        waiter.wait()
    finally:
        waiter.close()
    waiter.request()


def test_signal_waiter_restores_handlers():
    before = signal.getsignal(signal.SIGTERM)
    SignalWaiter().close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_signal_waiter_returns_stop_before_reload():
    waiter = SignalWaiter(reloads=True)
    try:
        assert waiter.wait(0) is ProcessRequest.NOTHING
        os.kill(os.getpid(), signal.SIGHUP)
        assert waiter.wait() is ProcessRequest.RELOAD
        assert waiter.wait(0) is ProcessRequest.NOTHING
        os.kill(os.getpid(), signal.SIGHUP)
        waiter.request()
        assert waiter.stopping
        assert waiter.wait() is ProcessRequest.STOP
        assert waiter.wait() is ProcessRequest.STOP
    finally:
        waiter.close()


def test_signal_waiter_without_reload_ignores_sighup():
    before = signal.getsignal(signal.SIGHUP)
    waiter = SignalWaiter()
    assert signal.getsignal(signal.SIGHUP) is before
    waiter.close()


class TestSettings:
    def test_adopts_reloadable_settings(self):
        old = DaemonSettings()
        agent = AgentSettings(keep_free_bytes=1, retain_days=2.0, workers=3)
        news = adopt_settings(
            old, replace(old, agent=agent, log=LogSettings(level="debug", audit="/a"))
        )
        assert news.changed == ("agent.keep_free_bytes", "agent.retain_days", "log.level")
        assert news.pending_restart == ("agent.workers", "log.audit")
        assert news.settings.agent == AgentSettings(keep_free_bytes=1, retain_days=2.0)
        assert news.settings.log == LogSettings(level="debug")

    def test_reports_no_change_of_equal_settings(self):
        news = adopt_settings(DaemonSettings(), DaemonSettings())
        assert (news.settings, news.changed, news.pending_restart) == (DaemonSettings(), (), ())


class TestNotifier:
    def test_sends_nothing_without_service_manager(self):
        notifier = ServiceManagerNotifier({"WATCHDOG_USEC": "2000000"})
        notifier.send_ready("x")
        assert notifier.tick_s == LIVENESS_INTERVAL_S
        with notifier.extend_timeout(60):
            pass

    @pytest.mark.parametrize(
        ("environ", "tick_s"),
        [
            ({"WATCHDOG_USEC": "2000000"}, 1.0),
            ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid())}, 1.0),
            ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"}, 10.0),
            ({"WATCHDOG_USEC": "-5"}, 10.0),
            ({"WATCHDOG_USEC": "600000000"}, 10.0),
            ({}, 10.0),
        ],
    )
    def test_tick_is_half_of_watchdog_interval(self, environ, tick_s):
        assert ServiceManagerNotifier({"NOTIFY_SOCKET": "/nowhere", **environ}).tick_s == tick_s

    def test_extends_timeout_during_long_start(self, socket_folder: Path):
        address = str(socket_folder / "n.sock")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(address)
            notifier = ServiceManagerNotifier({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "20000"})
            with notifier.extend_timeout(60):
                assert manager.recv(99) == b"EXTEND_TIMEOUT_USEC=30000\nWATCHDOG=1"
                assert manager.recv(99).startswith(b"EXTEND_TIMEOUT_USEC=")
            with notifier.extend_timeout(60, unless=lambda: True):
                notifier.send_status("stopping")
            said = b""
            while said != b"STATUS=stopping":
                said = manager.recv(99)
                assert said == b"STATUS=stopping" or said.startswith(b"EXTEND")

    def test_logs_missing_service_manager(self, caplog):
        ServiceManagerNotifier({"NOTIFY_SOCKET": "@rankdump nobody"}).send_ready("here")
        assert "cannot be notified of READY=1 at @rankdump nobody" in caplog.text


class FakeComponent(Component):
    """Component whose start, drain and fault a test sets."""

    def __init__(
        self,
        on_start: Callable[[], None] = lambda: None,
        on_drain: Callable[[], int] = lambda: 0,
        max_stop_s: float = 60.0,
    ) -> None:
        self.on_start, self.on_drain, self.max_stop_s = on_start, on_drain, max_stop_s
        self.stopped = self.finished = 0
        self.given: list[DaemonSettings] = []

    def start(self) -> None:
        self.on_start()

    def drain(self, timeout_s: float) -> int:
        return self.on_drain()

    def count_finished(self) -> int:
        return self.finished

    def stop(self) -> None:
        self.stopped += 1

    def reload(self, settings: DaemonSettings) -> None:
        self.given.append(settings)

    def summarize(self) -> str:
        return "7 frames under way"


class FakeServer(GrpcServer):
    def __init__(self) -> None:
        super().__init__("unix:/unused", ())

    def start(self) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return "here"

    def refuse(self) -> None: ...

    def set_serving(self, *, is_serving: bool) -> None: ...

    def stop(self, grace_s: float) -> None: ...


class ProcessExit(BaseException):
    """Raised in place of the exit of the process."""


def test_collector_leaves_out_what_is_loaded_and_runs_less_often():
    frozen, loaded = gc.get_freeze_count(), [[] for _ in range(2000)]
    gc.set_threshold(700, 10, 10)
    lifecycle.relax_garbage_collector()
    assert gc.get_freeze_count() >= frozen + len(loaded)
    first, *others = gc.get_threshold()
    assert first > 700
    assert others == [10, 10]
    assert gc.isenabled()


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []

    def leave(status: int) -> None:
        found.append(status)
        raise ProcessExit

    monkeypatch.setattr(os, "_exit", leave)
    return found


SETTINGS = DaemonSettings(agent=AgentSettings(drain_timeout_s=0.1))


def reread(environ: object) -> DaemonSettings:
    raise ConfigError("rankdumpd.toml", "agent.x", "", "known keys")


def run_process(
    components: list[FakeComponent], server: FakeServer, *, max_drain_s: float = 0.0
) -> int:
    daemon_run = lifecycle.DaemonRun(
        components, server, settings=SETTINGS, reread=reread, max_drain_s=max_drain_s
    )
    return daemon_run.run()


def test_process_exits_when_drain_hangs(exits: list[int], caplog):
    """The process exits soon after the deadline."""
    release = threading.Event()
    hanging = FakeComponent(on_drain=lambda: int(release.wait(60)), max_stop_s=0.2)
    components = [hanging, FakeComponent(max_stop_s=0.2)]
    with pytest.raises(ProcessExit):
        run_process(components, FakeServer())
    assert exits == [1]
    assert "the stop does not end" in caplog.text
    assert "rankdumpd-end): 7 frames under way; 7 frames" in caplog.text
    release.set()


def test_end_is_waited_for_while_something_is_finished_up_to_its_limit():
    """With 30 s between items, 100 s without one are too many; so is an end of 200 s."""
    watch = lifecycle.EndWatch(1000.0, idle_s=100.0, limit_s=200.0)
    assert not any(watch.is_overdue(each, now_s=1000.0 + 30 * each) for each in range(7))
    assert watch.is_overdue(7, now_s=1210.0)
    watch = lifecycle.EndWatch(1000.0, idle_s=100.0, limit_s=900.0)
    assert not watch.is_overdue(1, now_s=1090.0)
    assert not watch.is_overdue(1, now_s=1180.0)
    assert watch.is_overdue(1, now_s=1190.0)


def test_process_that_ends_with_its_job_exits_when_it_finishes_nothing(exits, caplog):
    release = threading.Event()
    hanging = FakeComponent(on_drain=lambda: int(release.wait(60)), max_stop_s=0.2)
    with pytest.raises(ProcessExit):
        run_process([hanging], FakeServer(), max_drain_s=600)
    assert exits == [1]
    release.set()


def test_process_that_ends_with_its_job_fails_when_something_is_left(exits, caplog):
    """Nobody continues its work, so what is left is lost, and the last line of its log says it."""
    caplog.set_level("INFO")
    assert run_process([FakeComponent(on_drain=lambda: 3)], FakeServer(), max_drain_s=600) == 1
    assert run_process([FakeComponent(on_drain=lambda: 3)], FakeServer()) == 0
    stops = [each for each in caplog.messages if each.startswith("stopped")]
    assert stops[0].startswith("stopped; not finished: FakeComponent: 3 items are unfinished")
    assert stops[1] == "stopped"


def test_wait_goes_on_while_something_is_finished():
    left, given = [5, 4, 3], []

    def wait(timeout_s: float) -> int:
        given.append(timeout_s)
        return left.pop(0)

    counts = iter([0, 1, 1, 2, 2, 2])
    found = lifecycle.wait_while_finishing(
        wait, lambda: next(counts), idle_s=7.0, left_s=lambda: 60.0
    )
    assert (found, given) == (3, [7.0] * 3)


def test_wait_ends_at_its_limit_though_something_is_finished():
    times = iter([2.0, 0.0])
    counts = iter(range(9))
    found = lifecycle.wait_while_finishing(
        lambda _: 4, lambda: next(counts), idle_s=7.0, left_s=lambda: next(times)
    )
    assert found == 4


def test_process_exits_and_names_thread_that_blocks_exit(exits: list[int], caplog):
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="rankdumpd-stuck")
    with pytest.raises(ProcessExit):
        run_process([FakeComponent(thread.start)], FakeServer())
    assert exits == [1]
    assert "rankdumpd-stuck" in caplog.text
    release.set()
    thread.join()


def test_process_logs_failed_drain_and_stops_components(exits: list[int], caplog):
    components = [FakeComponent(on_drain=lambda: 1 // 0), FakeComponent()]
    assert run_process(components, FakeServer()) == 1
    assert [component.stopped for component in components] == [1, 1]
    assert "ZeroDivisionError" in caplog.text
    assert not exits


def test_process_with_failed_start_stops_started_components(exits: list[int]):
    def fails() -> None:
        raise ConfigError("f", "k", "v", "other")

    components = [FakeComponent(), FakeComponent(fails), FakeComponent()]
    with pytest.raises(ConfigError):
        run_process(components, FakeServer())
    assert [component.stopped for component in components] == [0, 1, 1]
    assert not exits
