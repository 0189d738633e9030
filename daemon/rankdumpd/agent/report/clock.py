"""Offset of the coordinator's clock from this host's, estimated from round-trip times.
Pure.

Nothing is assumed about the path: the true offset lies anywhere between the bounds that the
fastest request and the fastest response give. Older samples count less, because clocks drift.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rankdump._core.status import ClockEstimate

MAX_SAMPLES = 64
MAX_AGE_US = 300_000_000
DRIFT_PPM = 100
"""Fastest drift between two clocks that are not set."""
STEP_US = 1_000
STEP_PPM = 500
"""Deviation from the monotonic clock above which a clock counts as set; slewing stays below."""


@dataclass(frozen=True, slots=True)
class ClockInstant:
    """One moment on both clocks of this host."""

    wall_us: int
    monotonic_us: int


@dataclass(frozen=True, slots=True)
class ClockSample:
    """One request to the coordinator and its response."""

    sent: ClockInstant
    received_us: int
    """On the coordinator's clock, as is `answered_us`."""
    answered_us: int
    back: ClockInstant

    @property
    def delay_us(self) -> int:
        """Return the round-trip time without the coordinator's part; drift may make it negative."""
        took_us = self.back.monotonic_us - self.sent.monotonic_us
        return took_us - (self.answered_us - self.received_us)

    @property
    def offset_us(self) -> int:
        """Return the midpoint of the possible offsets."""
        there = self.received_us - self.sent.wall_us
        return (there + self.answered_us - self.back.wall_us) // 2

    def error_us(self, now: ClockInstant) -> int:
        """Return the largest error of the offset at this moment."""
        # Clocks drift during the request, too.
        age_us = max(0, now.monotonic_us - self.sent.monotonic_us)
        # One more for the rounding of the divisions.
        return (self.delay_us + 1) // 2 + _drift_us(age_us) + 1


@dataclass(frozen=True, slots=True)
class ClockWindow:
    """The samples in use, and how often this host's clock has been set."""

    samples: tuple[ClockSample, ...] = ()
    steps: int = 0
    last: ClockInstant | None = None

    def at(self, now: ClockInstant) -> ClockWindow:
        """Return the window at a later moment; empty when the clock was set in between."""
        if self.last is not None and _is_stepped(self.last, now):
            return ClockWindow(steps=self.steps + 1, last=now)
        oldest_us = now.monotonic_us - MAX_AGE_US
        young = tuple(s for s in self.samples if s.back.monotonic_us >= oldest_us)
        return replace(self, samples=young, last=now)

    def with_sample(self, sample: ClockSample) -> ClockWindow:
        """Return the window with one more sample; an implausible one changes nothing."""
        window = self.at(sample.sent)
        across = window.at(sample.back)
        if across.steps != window.steps or sample.answered_us < sample.received_us:
            return across
        # One more for the rounding of the clocks.
        if sample.delay_us < -_drift_us(sample.back.monotonic_us - sample.sent.monotonic_us) - 1:
            return across
        known = across.estimate(sample.back)
        apart_us = abs(sample.offset_us - known.offset_us)
        if known.known and apart_us > known.error_us + sample.error_us(sample.back):
            # Both cannot be true: the coordinator's clock was set.
            return replace(across, samples=(sample,))
        return replace(across, samples=(*across.samples, sample)[-MAX_SAMPLES:])

    def estimate(self, now: ClockInstant) -> ClockEstimate:
        """Return the offset with the smallest error."""
        if not self.samples:
            return ClockEstimate(steps=self.steps)
        best = min(self.samples, key=lambda sample: sample.error_us(now))
        return ClockEstimate(best.offset_us, best.error_us(now), self.steps, known=True)


def _drift_us(elapsed_us: int) -> int:
    return -(-elapsed_us * DRIFT_PPM // 1_000_000)


def _is_stepped(earlier: ClockInstant, later: ClockInstant) -> bool:
    elapsed_us = later.monotonic_us - earlier.monotonic_us
    jump_us = later.wall_us - earlier.wall_us - elapsed_us
    return abs(jump_us) > STEP_US + elapsed_us * STEP_PPM // 1_000_000
