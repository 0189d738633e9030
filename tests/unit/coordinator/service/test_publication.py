"""What is merged ahead is used only for the very iteration it was merged from."""

from __future__ import annotations

import dataclasses
import threading

import pytest
from support.order_jobs import view_of

from rankdump._core.events import EventColumns, EventKind, RankEvent
from rankdumpd.coordinator.execution_order import GlobalOrder
from rankdumpd.coordinator.fleet_views import IterationView
from rankdumpd.coordinator.service import publication
from rankdumpd.coordinator.service.publication import OrderPremerger

PATIENCE_S = 30
VIEW = view_of(
    {0: [EventColumns.from_events([RankEvent(0, 1, 1, 1, "Add", EventKind.OPERATOR, 1, 2)])]}
)


class Counted:
    """The merge, and how often it was asked."""

    def __init__(self) -> None:
        self.views: list[IterationView] = []
        self.merged = threading.Event()
        self._merge = publication.merge_iteration

    def __call__(self, view: IterationView) -> GlobalOrder:
        self.views.append(view)
        self.merged.set()
        return self._merge(view)


@pytest.fixture
def merges(monkeypatch) -> Counted:
    counted = Counted()
    monkeypatch.setattr(publication, "merge_iteration", counted)
    return counted


def merged_ahead(merges: Counted, view: IterationView, *, writing: bool = True) -> OrderPremerger:
    one = OrderPremerger(lambda _: view)
    one.is_writing = writing
    one.thread.start()
    if writing:
        assert merges.merged.wait(PATIENCE_S)
    one.thread.stop()
    one.thread.stop()
    return one


def test_premerger_returns_order_merged_ahead(merges):
    """A view made anew of the same batches is the same."""
    one = merged_ahead(merges, VIEW)
    order = one.merge_view(dataclasses.replace(VIEW, stalls={0: 5}))
    assert len(order) == 1
    assert len(merges.views) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"iteration": 8},
        {"late": (1,), "late_count": 1},
        {"spans": {0: (1, 2)}},
        {
            "events": {
                0: (
                    EventColumns.from_events(
                        [RankEvent(0, 1, 1, 1, "B", EventKind.OPERATOR, 1, 2)]
                    ),
                )
            }
        },
    ],
)
def test_premerger_merges_changed_view_again(merges, change):
    """More events, a span, a rank that was given up: the order may be another."""
    one = merged_ahead(merges, VIEW)
    now = dataclasses.replace(VIEW, **change)
    one.merge_view(now)
    assert merges.views == [VIEW, now]


def test_premerger_is_idle_while_nothing_is_written(merges):
    """Then the merge itself is what everybody waits for."""
    one = merged_ahead(merges, VIEW, writing=False)
    assert merges.views == []
    one.merge_view(VIEW)
    assert merges.views == [VIEW]


def test_premerger_raises_failed_merge_when_view_is_requested(monkeypatch):
    """And not before: it is said where it can be counted."""
    tried = threading.Event()

    def broken(_view: IterationView) -> GlobalOrder:
        tried.set()
        raise IndexError("a bug")

    monkeypatch.setattr(publication, "merge_iteration", broken)
    one = OrderPremerger(lambda _: VIEW)
    one.is_writing = True
    one.thread.start()
    assert tried.wait(PATIENCE_S)
    one.thread.stop()
    with pytest.raises(IndexError):
        one.merge_view(VIEW)
