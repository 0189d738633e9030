"""Time that calls of rankdump take: outermost calls count once, on every thread."""

from __future__ import annotations

import threading

from rankdump._core.hook_meter import HookMeter


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0
        self.reads = 0

    def __call__(self) -> int:
        self.reads += 1
        return self.now_ns


def test_call_within_a_call_counts_once_and_reads_no_clock():
    clock = Clock()
    meter = HookMeter(clock)
    assert meter.begin()
    clock.now_ns = 10
    assert not meter.begin()
    clock.now_ns = 30
    meter.end()
    assert (meter.ended_ns, clock.reads) == (30, 2)


def test_split_takes_the_part_of_the_running_call():
    clock = Clock()
    meter = HookMeter(clock)
    meter.begin()
    clock.now_ns = 40
    assert meter.split() == (40, 40)
    clock.now_ns = 100
    meter.end()
    assert meter.split() == (100, 100)


def test_calls_of_several_threads_add_up():
    clock = Clock()
    meter = HookMeter(clock)
    meter.begin()

    def call() -> None:
        assert meter.begin()
        clock.now_ns += 5
        meter.end()

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    meter.end()
    assert meter.ended_ns == 10


def test_meter_is_on_until_the_last_session_stops():
    meter = HookMeter(Clock())
    meter.start()
    meter.start()
    meter.stop()
    assert meter.is_on
    meter.begin()
    meter.stop()
    meter.end()
    assert (meter.is_on, meter.ended_ns) == (False, 0)


def test_meter_of_a_forked_child_is_off_for_all_sessions():
    meter = HookMeter(Clock())
    meter.start()
    meter.start()
    meter.disarm()
    assert not meter.is_on
