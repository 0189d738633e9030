"""Writes what was gathered to the state, and lets go of jobs that are long over."""

from __future__ import annotations

import logging
import time

from rankdump.contract.errors import DamagedError, RankdumpError, UnavailableError
from rankdump.wire.views import view_to_wire
from rankdumpd.coordinator.gather import Gather
from rankdumpd.coordinator.service.answers import chosen, status_of
from rankdumpd.coordinator.state import State
from rankdumpd.settings import CoordinatorSettings

_LOG = logging.getLogger(__name__)
_DAY_S = 86_400.0


class Keeping:
    """Gather on one side, the state on the other; its owner calls from one thread at a time."""

    def __init__(self, gather: Gather, state: State, settings: CoordinatorSettings) -> None:
        self._gather = gather
        self._state = state
        self._settings = settings
        self.problem = ""
        """Why the state cannot be written; empty when it can."""

    def recall(self) -> None:
        """Fill the gathered with what outlived the process before; DamagedError when that is not
        what was written, or such that nobody could be told of it.
        """
        now_s = time.monotonic()
        try:
            self._gather.restore(self._state.rows(), now_s=now_s, now_us=_wall_us())
            fleet = self._gather.fleet(now_s=now_s)
            view_to_wire(status_of(fleet, chosen(fleet, ""), ""))
        except RankdumpError:
            raise
        except Exception as error:
            raise DamagedError(f"coordinator.sqlite is damaged: {error!r}") from error

    def flush(self) -> None:
        """Write what has changed; only then it is acknowledged."""
        rows = self._gather.changes(now_s=time.monotonic(), now_us=_wall_us())
        if not rows:
            return
        try:
            self._state.write(rows.values())
        except BaseException as error:
            self._gather.failed(rows)
            if not isinstance(error, UnavailableError):
                raise
            if str(error) != self.problem:
                _LOG.error("%s; nothing is acknowledged until it can be", error)
            self.problem = str(error)
            return
        if self.problem:
            _LOG.warning("the state can be written again: %d rows", len(rows))
        self.problem = ""
        self._gather.committed(rows.values())

    def retire(self) -> list[str]:
        """Let go of finished jobs that are too old, or too many; their trees stay. Name them."""
        limit_s = self._settings.keep_days * _DAY_S
        now_s = time.monotonic()
        gone: list[str] = []
        try:
            for job_id, age_s in self._gather.finished(now_s=now_s, silent_s=_DAY_S):
                too_large = self._state.size_bytes > self._settings.keep_bytes
                if age_s < limit_s and not too_large:
                    break
                self._state.forget(job_id)
                self._gather.forget(job_id)
                gone.append(job_id)
                why = f"the state is over {self._settings.keep_bytes} bytes" if too_large else ""
                why = why or f"it is over for {age_s / _DAY_S:.0f} days"
                _LOG.info(
                    "job %s: no longer kept: %s; its tree stays",
                    job_id,
                    why,
                    extra={"job": job_id},
                )
            self._state.forget_agents(self._gather.forget_agents(before_s=now_s - limit_s))
        except UnavailableError as error:
            _LOG.error("%s; old jobs stay", error)
        return gone


def _wall_us() -> int:
    return time.time_ns() // 1000
