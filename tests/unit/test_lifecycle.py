"""A daemon hears the wish to stop, whenever it comes and whichever thread it reaches."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from rankdumpd.signals import Signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_wait_counts(number):
    asked = Signals()
    try:
        os.kill(os.getpid(), number)
        asked.wait()
    finally:
        asked.close()


def test_a_signal_to_another_thread_wakes_the_wait():
    """The kernel may give a signal to any thread: the one that waits must learn of it."""
    asked = Signals()
    ready, done = threading.Event(), threading.Event()

    def other() -> None:
        ready.set()
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        done.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        ready.wait(60)
        asked.wait()
    finally:
        done.set()
        thread.join()
        asked.close()


@pytest.mark.parametrize("first", ["leash", "signal"])
def test_a_wish_by_leash_and_by_signal_is_one_wish(first):
    """A service manager may signal a worker whose front has just asked it to drain."""
    asked = Signals()
    try:
        if first == "leash":
            asked.ask()
        os.kill(os.getpid(), signal.SIGTERM)
        asked.ask()
        asked.wait()
    finally:
        asked.close()
    asked.ask()


def test_handlers_are_given_back():
    before = signal.getsignal(signal.SIGTERM)
    Signals().close()
    assert signal.getsignal(signal.SIGTERM) is before
