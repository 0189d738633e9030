"""Requests of the page of metrics that are refused: counted, written down, and said in the log."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from rankdumpd.audit import Audit
from rankdumpd.callers import Caller
from rankdumpd.meters import Meters

COUNTER = "rankdump_refused_page_requests_total"
PAUSE_S = 1.0
"""Between two lines of the audit about callers that showed no certificate that is believed."""

_log = logging.getLogger(__name__)


class Refusals:
    """Safe to use from several threads.

    Whoever reaches the port can be refused as often as he likes: of those whom nothing identifies
    a line a second is written, with how many were left out, so that they cannot drive what others
    did out of the audit. All are counted.
    """

    def __init__(
        self,
        meters: Meters,
        audit: Audit | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Show the counters as 0; `clock` gives seconds that only rise."""
        self._meters, self._audit, self._clock = meters, audit, clock
        self._meters.begin(COUNTER)
        self._lock = threading.Lock()
        self._said: set[str] = set()
        self._quiet_to_s = 0.0
        self._left_out = 0

    def count(self, reason: str) -> None:
        """Count a refusal of which nothing is known but its reason, one of the metric's."""
        self._meters.add(COUNTER, reason=reason)

    def add(self, reason: str, caller: Caller, asked: str, why: str) -> None:
        """Count a refusal, and write down who asked for what; the log says each reason once."""
        self.count(reason)
        self._say(reason, why)
        if self._audit is None:
            return
        more = 0 if caller.known else self._turn()
        if more is not None:
            told = {"method": asked, **caller.fields(), "result": reason}
            self._audit.add("refused", {**told, "more": more} if more else told)

    def _turn(self) -> int | None:
        """Return how many were left out before this one; None where this one is as well."""
        with self._lock:
            now_s = self._clock()
            if now_s < self._quiet_to_s:
                self._left_out += 1
                return None
            self._quiet_to_s = now_s + PAUSE_S
            left_out, self._left_out = self._left_out, 0
            return left_out

    def _say(self, reason: str, why: str) -> None:
        with self._lock:
            if reason in self._said:
                return
            self._said.add(reason)
        _log.warning("the page of metrics refused a request: %s", why)
