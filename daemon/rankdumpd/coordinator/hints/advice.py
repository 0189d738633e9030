"""The exact lines that make room for a wait. Pure.

Every limit that would strike is raised to twice the need, rounded as the runtime rounds, and in
the order of each other that HCCL wants: event above execution, watchdog above execution.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from rankdumpd.coordinator.hints import hccl
from rankdumpd.coordinator.hints.limits import Grade, GroupLimits
from rankdumpd.coordinator.hints.reading import SECOND_US, Limit
from rankdumpd.coordinator.hints.steps import step_after

_SAFETY = 2
_MILLISECONDS = ("stream_sync_timeout", "event_sync_timeout")
"""What TF counts in milliseconds."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Lines to set, and what they cannot do."""

    settings: tuple[str, ...] = ()
    remark: str = ""


def advice(limits: GroupLimits, sequence: int, *, limit_us: int, expected_us: int) -> Advice:
    """Return what to set for a wait of that length, given the limit it comes near to."""
    need_us = step_after(expected_us / limit_us) * limit_us
    target_s = ceil(_SAFETY * need_us / SECOND_US)
    raised = _Raised(limits, sequence, target_s)
    return Advice(tuple(raised.lines()), raised.remark)


class _Raised:
    """The limits of one group, raised to a target."""

    def __init__(self, limits: GroupLimits, sequence: int, target_s: int) -> None:
        self._target_s = target_s
        self._settable = [each for each in limits.covering(sequence) if not each.derived]
        self._by_name: dict[str, Limit] = {}
        for each in self._settable:
            known = self._by_name.setdefault(each.limit.name, each)
            if each.limit.limit_us < known.limit.limit_us:
                self._by_name[each.limit.name] = each
        self._aiv = limits.aiv
        self._exec_s = self._execution()
        self.remark = self._remark()

    def lines(self) -> Iterator[str]:
        if self._aiv and self._exec_s > hccl.AIV_MOST_S:
            # The default of every device is another mode.
            yield "unset HCCL_OP_EXPANSION_MODE"
        if self._below(hccl.EXEC, self._exec_s):
            yield f"export {hccl.EXEC}={self._exec_s}"
        if self._below(hccl.SESSION_EXEC, self._exec_s):
            yield f"NPURunConfig(..., {hccl.SESSION_EXEC}={self._exec_s})"
        if self._low(hccl.EVENT, above_s=self._exec_s):
            yield f"export {hccl.EVENT}={self._above_execution()}"
        connect_s = min(self._target_s, hccl.CONNECT_MOST_S)
        if self._below(hccl.CONNECT, connect_s):
            yield f"export {hccl.CONNECT}={connect_s}"
        for grade, call in _CALLS.items():
            if self._low(grade.value, above_s=self._exec_s):
                yield f"{call}(..., timeout=timedelta(seconds={self._above_execution()}))"
        yield from self._others()

    def _others(self) -> Iterator[str]:
        known = {hccl.EXEC, hccl.SESSION_EXEC, hccl.EVENT, hccl.CONNECT}
        known |= {grade.value for grade in Grade}
        for name in self._by_name:
            if name in known or not self._low(name, above_s=self._exec_s):
                continue
            seconds = self._above_execution()
            if name in _MILLISECONDS:
                yield f"NPURunConfig(..., {name}={seconds * 1000})"
            else:
                yield f"{name}={seconds}"

    def _low(self, name: str, *, above_s: int = 0) -> bool:
        """Return whether a limit would strike, or stands not above the one of execution."""
        return self._below(name, max(self._target_s, above_s + bool(above_s)))

    def _below(self, name: str, seconds: int) -> bool:
        found = self._by_name.get(name)
        return found is not None and found.limit.limit_us < seconds * SECOND_US

    def _execution(self) -> int:
        """Return the limit of execution in seconds, raised where it would strike; 0: none."""
        for name in (hccl.EXEC, hccl.SESSION_EXEC):
            if self._low(name):
                if self._aiv and self._target_s <= hccl.AIV_MOST_S:
                    return self._target_s
                return min(ceil(self._target_s / hccl.STEP_S) * hccl.STEP_S, hccl.MOST_S)
            if name in self._by_name:
                return self._by_name[name].limit.limit_us // SECOND_US
        return 0

    def _above_execution(self) -> int:
        above_s = self._exec_s + hccl.EVENT_MARGIN_S if self._exec_s else 0
        return max(self._target_s, above_s)

    def _remark(self) -> str:
        if (self._low(hccl.EXEC) or self._low(hccl.SESSION_EXEC)) and self._target_s > hccl.MOST_S:
            return f"910 and 310P take no more than {hccl.MOST_S} s"
        if self._low(hccl.CONNECT) and self._target_s > hccl.CONNECT_MOST_S:
            return f"{hccl.CONNECT} takes no more than {hccl.CONNECT_MOST_S} s"
        return ""


_CALLS = {Grade.WORLD: "init_process_group", Grade.PART: "new_group"}
