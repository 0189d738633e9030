"""A running job for the live page, whose states and answers a test decides."""

from __future__ import annotations

from collections.abc import Callable

from rankdump._core.job_control import ControlAction, ControlOrder
from rankdump._core.status import IterationStatus, SessionState, SessionStatus, StatusView
from rankdump._web.job_source import ControlOutcome
from rankdump.errors import RankdumpError

HOSTILE_JOB = 'a"><script>alert(1)</script>\r\nevent: state\r\ndata: x'


class ScriptedSource:
    """Answers with `view`, or raises `error`; keeps the orders."""

    address = "unix:/nowhere/a.sock"

    def __init__(self, view: StatusView | None = None) -> None:
        self.view = view if view is not None else make_view()
        self.error: RankdumpError | None = None
        self.refusal: RankdumpError | None = None
        self.actions = tuple(ControlAction)
        self.reads = 0
        self.orders: list[ControlOrder] = []
        self.while_sending: Callable[[], object] = lambda: None
        self.is_complete = True

    def read_status(self) -> StatusView:
        self.reads += 1
        if self.error:
            raise self.error
        return self.view

    def list_actions(self) -> tuple[ControlAction, ...]:
        return self.actions

    def send_control(self, order: ControlOrder) -> ControlOutcome:
        self.while_sending()
        if self.refusal:
            raise self.refusal
        self.orders.append(order)
        lines = (f"job {order.job_id}: done", "rank 1: <b>late</b>")
        return ControlOutcome(lines, self.is_complete)


def make_view(
    job_id: str = "train",
    *,
    ranks: int = 2,
    iterations: int = 3,
    state: SessionState = SessionState.OPEN,
    host: str = "h",
    dropped: int = 0,
) -> StatusView:
    """Return the status of a job of some ranks."""
    sessions = tuple(
        SessionStatus(
            job_id,
            f"s{rank}",
            rank,
            ranks,
            rank,
            host,
            pid=1,
            state=state,
            selected="all",
            operators="all",
            saved_data="full",
        )
        for rank in range(ranks)
    )
    balances = tuple(
        IterationStatus(
            job_id,
            f"s{rank}",
            rank,
            iteration,
            complete=True,
            expected=4,
            stored=4 - dropped,
            dropped={"disk_low": dropped} if dropped else {},
        )
        for rank in range(ranks)
        for iteration in range(iterations)
    )
    return StatusView(sessions, balances, roots=("/data/dump",))
