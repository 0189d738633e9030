"""Tests of ClockWindow: the estimated offset is right within its error for any delays."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import example, given
from hypothesis import strategies as st

from rankdumpd.agent.report.report_stream import (
    MAX_AGE_US,
    MAX_SAMPLES,
    ClockInstant,
    ClockSample,
    ClockWindow,
)

START_US = 1_700_000_000_000_000
DELAYS = st.integers(0, 200_000)


@dataclass
class SimulatedClocks:
    """Two clocks and the true time, in microseconds since the start."""

    offset_us: int
    drift_ppm: int = 0
    set_by_us: int = 0
    """How far this host's clock was moved."""
    time_us: int = 0

    def here(self) -> ClockInstant:
        return ClockInstant(START_US + self.set_by_us + self.time_us, 5_000 + self.time_us)

    def there(self) -> int:
        ahead_us = self.offset_us + self.time_us * self.drift_ppm // 1_000_000
        return START_US + ahead_us + self.time_us

    def true_us(self) -> int:
        return self.there() - self.here().wall_us

    def ask(self, there_us: int, inside_us: int, back_us: int) -> ClockSample:
        sent = self.here()
        self.time_us += there_us
        received_us = self.there()
        self.time_us += inside_us
        answered_us = self.there()
        self.time_us += back_us
        return ClockSample(sent, received_us, answered_us, self.here())


ASKED = st.lists(st.tuples(DELAYS, DELAYS, DELAYS, st.integers(0, 60_000_000)), min_size=1)


@given(st.integers(-(10**12), 10**12), st.integers(-50, 50), ASKED)
# The clocks drift apart by more than the answer was on its way.
@example(offset_us=0, drift_ppm=48, asked=[(0, 20_834, 0, 0)])
@example(offset_us=0, drift_ppm=50, asked=[(3, 200_000, 4, 60_000_000)] * 3)
def test_estimate_contains_true_offset(offset_us, drift_ppm, asked):
    """However unequal the ways there and back are, however old the samples and clocks drift."""
    world, window = SimulatedClocks(offset_us, drift_ppm), ClockWindow()
    for there_us, inside_us, back_us, pause_us in asked:
        window = window.with_sample(world.ask(there_us, inside_us, back_us))
        assert len(window.samples) <= MAX_SAMPLES
        world.time_us += pause_us
        now = world.here()
        window = window.at(now)
        estimate = window.estimate(now)
        assert estimate.known
        assert estimate.steps == 0
        assert abs(estimate.offset_us - world.true_us()) <= estimate.error_us


@given(DELAYS, st.integers(1, 10), ASKED)
def test_estimate_uses_fastest_answer(delay_us, quick_us, asked):
    """The error is that of the quickest answer, with a little for its age."""
    world, window = SimulatedClocks(77), ClockWindow()
    window = window.with_sample(world.ask(delay_us, 0, delay_us))
    window = window.with_sample(world.ask(quick_us, 0, quick_us))
    window = window.with_sample(world.ask(delay_us, 0, delay_us))
    assert window.estimate(world.here()).error_us <= quick_us + 2 + 2 * delay_us // 10_000 + 1


@given(
    st.integers(2_000, 10**12) | st.integers(-(10**12), -2_000),
    st.integers(0, 900_000),
    st.integers(-400, 400),
)
def test_window_is_emptied_when_clock_is_set(jump_us, pause_us, slewed_ppm):
    """A step empties the window and is counted; a clock that is adjusted slowly is not stepped."""
    world, window = SimulatedClocks(1_000), ClockWindow()
    window = window.with_sample(world.ask(100, 0, 100))
    world.time_us += pause_us
    world.set_by_us += pause_us * slewed_ppm // 1_000_000
    assert window.at(world.here()).steps == 0
    world.set_by_us += jump_us
    # Together they may be less than what counts as a step.
    if abs(jump_us + pause_us * slewed_ppm // 1_000_000) <= 1_500 + pause_us // 2_000:
        return
    stepped = window.at(world.here())
    assert (stepped.steps, stepped.samples) == (1, ())
    assert not stepped.estimate(world.here()).known
    again = window.with_sample(world.ask(100, 0, 100))
    estimate = again.estimate(world.here())
    assert (estimate.steps, len(again.samples)) == (1, 1)
    assert abs(estimate.offset_us - world.true_us()) <= estimate.error_us


def test_window_ignores_sample_during_which_clock_was_set():
    """The answer came back to another clock than the question left."""
    world = SimulatedClocks(0)
    sent = world.here()
    world.time_us += 100
    there_us = world.there()
    world.set_by_us = 50_000
    window = ClockWindow().with_sample(ClockSample(sent, there_us, there_us, world.here()))
    assert (window.steps, window.samples) == (1, ())


def test_window_restarts_when_coordinator_clock_was_set():
    """Two samples that cannot both be true: the later one counts, and it is no step of ours."""
    world, window = SimulatedClocks(0), ClockWindow()
    window = window.with_sample(world.ask(10, 0, 10))
    world.offset_us = 3_000_000
    window = window.with_sample(world.ask(500, 0, 500))
    estimate = window.estimate(world.here())
    assert abs(estimate.offset_us - 3_000_000) <= estimate.error_us
    assert (estimate.steps, len(window.samples)) == (0, 1)


def test_window_ignores_implausible_and_old_samples():
    """Answers from before their question, and samples of more than five minutes ago."""
    world, window = SimulatedClocks(0), ClockWindow()
    sent = world.here()
    world.time_us += 10
    assert window.with_sample(ClockSample(sent, 20, 10, world.here())).samples == ()
    assert window.with_sample(ClockSample(sent, 0, 1_000, world.here())).samples == ()
    window = window.with_sample(world.ask(10, 0, 10))
    world.time_us += MAX_AGE_US
    assert window.at(world.here()).samples
    world.time_us += 1
    assert not window.at(world.here()).samples
