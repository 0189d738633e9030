"""Coordinator's report store that is restarted repeatedly, its surviving files, and its agents."""

from __future__ import annotations

from rankdumpd.coordinator.fleet_views import AgentReport
from rankdumpd.coordinator.reports.report_store import ReportStore
from rankdumpd.coordinator.state.state_rows import ROW_TABLES, StateRow


class RestartedReportStore:
    """Each rank has its own agent, which continues after the acknowledged number."""

    def __init__(self, world: int) -> None:
        self.gather = ReportStore(deadline_s=1e9)
        self.sent = [0] * world
        """Items that each agent has said."""
        self._disk: dict[object, StateRow] = {}

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
        for rank in range(len(self.sent)):
            answer = self.gather.add_report(AgentReport(f"a{rank}", 0), now_s=0.0)
            self.sent[rank] = answer.acknowledged
