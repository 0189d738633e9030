"""Asks the coordinator for the time, often enough for one answer that was not delayed."""

from __future__ import annotations

import grpc

from rankdump.contract.status import ClockEstimate
from rankdump.wire.v1 import coordinator_pb2, coordinator_pb2_grpc
from rankdumpd.agent.report.clock import ClockWindow, Instant, Sample
from rankdumpd.agent.report.ports import Times

FIRST_ASKED = 8


class Timing:
    """The estimate of a reporter, over all of its connections; for one thread at a time."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self._window = ClockWindow()
        self._asked: Instant | None = None

    def reconnected(self) -> None:
        """Note that another coordinator may be there: what was known of its clock is void."""
        self._window = ClockWindow(steps=self._window.steps, last=self._window.last)
        self._asked = None

    def keep_up(self, stub: coordinator_pb2_grpc.CoordinatorServiceStub) -> bool:
        """Ask if it is time to; return whether it was."""
        now = self._times.now()
        known, self._window = self._window, self._window.at(now)
        if self._asked is None or self._window.steps != known.steps:
            self._ask(stub, FIRST_ASKED)
        elif now.monotonic_us - self._asked.monotonic_us >= self._times.heartbeat_s * 1e6:
            self._ask(stub, 1)
        else:
            return False
        return True

    def estimate(self) -> ClockEstimate:
        """Return what is known now."""
        return self._window.estimate(self._times.now())

    def _ask(self, stub: coordinator_pb2_grpc.CoordinatorServiceStub, count: int) -> None:
        for _ in range(count):
            self._asked = sent = self._times.now()
            try:
                answer = stub.Clock(coordinator_pb2.ClockRequest(), timeout=self._times.clock_s)
            except grpc.RpcError:
                # Reports do not depend on it.
                return
            back = self._times.now()
            sample = Sample(sent, answer.received_us, answer.sent_us, back)
            self._window = self._window.with_sample(sample)
