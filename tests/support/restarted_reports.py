"""Coordinator's report store that is restarted repeatedly, its surviving files, and its agents."""

from __future__ import annotations

from typing import Any

from rankdumpd.coordinator.fleet_views import AgentReport
from rankdumpd.coordinator.reports.report_store import ReportStore
from rankdumpd.coordinator.state import ROW_TABLES, StateRow

_NUMBER_GAP = 1_000


class RestartedReportStore:
    """Each rank has its own agent, which continues after the acknowledged number.

    An agent that was killed numbers what is not acknowledged anew.
    """

    def __init__(self, world: int) -> None:
        self.gather = ReportStore(deadline_s=1e9)
        self.sent = [0] * world
        """Items that each agent has said."""
        self._numbers: list[dict[int, int]] = [{0: 0} for _ in range(world)]
        """By the number of an item how many items were said with it."""
        self._gaps = [0] * world
        self._disk: dict[object, StateRow] = {}

    def say(self, rank: int, count: int = 1, **items: Any) -> None:
        """Report the next items of an agent, so many, together."""
        self.sent[rank] += count
        number = self.sent[rank] + self._gaps[rank]
        self._numbers[rank][number] = self.sent[rank]
        report = AgentReport(f"a{rank}", number, roots={"j": "/tree"}, **items)
        self.gather.add_report(report, now_s=0.0)

    def list_acknowledged(self) -> list[tuple[int, int]]:
        """Return how many items of each agent are acknowledged, and received."""
        answers = [
            self.gather.add_report(AgentReport(f"a{rank}", 0), now_s=0.0)
            for rank in range(len(self.sent))
        ]
        return [
            (_count_said(numbers, answer.acknowledged), _count_said(numbers, answer.received))
            for numbers, answer in zip(self._numbers, answers, strict=True)
        ]

    def kill_agent(self, rank: int) -> None:
        """Let the agent of a rank say again what is not acknowledged, with other numbers."""
        self.sent[rank], _ = self.list_acknowledged()[rank]
        self._gaps[rank] += _NUMBER_GAP
        # An acknowledgement that comes later is not for it.
        self._numbers[rank] = {
            number: count
            for number, count in self._numbers[rank].items()
            if count <= self.sent[rank]
        }

    def commit(self) -> None:
        """Write down what is new."""
        rows = self.gather.collect_changes(now_s=0.0, now_us=0)
        self._disk.update(rows)
        self.gather.mark_committed(rows.values())

    def die(self) -> None:
        """Lose everything but the disk."""
        self.gather = ReportStore(deadline_s=1e9)
        kinds = list(ROW_TABLES)
        rows = sorted(self._disk.values(), key=lambda row: kinds.index(type(row)))
        self.gather.restore(rows, now_s=0.0, now_us=0)
        self.sent = [acknowledged for acknowledged, _ in self.list_acknowledged()]


def _count_said(numbers: dict[int, int], number: int) -> int:
    """Return how many items are said up to a number; one in a gap is as good as the one before."""
    return numbers[max(each for each in numbers if each <= number)]
