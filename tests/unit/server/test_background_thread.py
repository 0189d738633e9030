"""Background thread: start, stop, and the report of its failure."""

from __future__ import annotations

import logging
import threading

import pytest

from rankdumpd.server.background_thread import BackgroundThread


def test_thread_runs_until_stopped_and_can_restart():
    looks = threading.Semaphore(0)

    def look() -> None:
        while not thread.wait(0.001):
            looks.release()

    thread = BackgroundThread(look, "rankdumpd-test")
    assert thread.stop(), "a stop without a start"
    for _ in range(2):
        thread.start()
        assert looks.acquire(timeout=10)
        assert thread.is_running
        assert thread.fault() == ""
        assert thread.stop(10)
        assert thread.stop(10)
        assert not thread.is_running
        assert thread.fault() == ""


def test_thread_stop_returns_after_timeout():
    release = threading.Event()
    thread = BackgroundThread(release.wait, "rankdumpd-test")
    thread.start()
    assert not thread.stop(0.01)
    release.set()
    assert thread.join(10)


def test_thread_logs_and_reports_exception(caplog: pytest.LogCaptureFixture):
    def fail() -> None:
        raise ValueError("no such rank")

    thread = BackgroundThread(fail, "rankdumpd-test")
    with caplog.at_level(logging.ERROR):
        thread.start()
        assert thread.join(10)
    assert thread.fault() == "thread rankdumpd-test has ended: ValueError('no such rank')"
    assert "thread rankdumpd-test has ended" in caplog.text
    assert "no such rank" in caplog.text


def test_thread_that_returns_without_stop_is_a_fault():
    thread = BackgroundThread(lambda: None, "rankdumpd-test")
    thread.start()
    assert thread.join(10)
    assert thread.fault() == "thread rankdumpd-test has ended: its function returned"
