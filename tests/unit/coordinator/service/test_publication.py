"""Merge of the next iteration ahead of its publication."""

from __future__ import annotations

import dataclasses
import threading

import pytest
from support.order_jobs import view_of

from rankdump._core.events import EventColumns, EventKind, RankEvent
from rankdumpd.coordinator.fleet_views import GlobalOrder, IterationView
from rankdumpd.coordinator.service import publication
from rankdumpd.coordinator.service.publication import OrderPremerger

PATIENCE_S = 300
VIEW = view_of(
    {0: [EventColumns.from_events([RankEvent(0, 1, 1, 1, "Add", EventKind.OPERATOR, 1, 2)])]}
)


class RecordedMerges:
    """Merge that records its calls."""

    def __init__(self) -> None:
        self.views: list[IterationView] = []
        self.merged = threading.Event()
        self._merge = publication.merge_iteration

    def __call__(self, view: IterationView) -> GlobalOrder:
        self.views.append(view)
        self.merged.set()
        return self._merge(view)


@pytest.fixture
def merges(monkeypatch) -> RecordedMerges:
    counted = RecordedMerges()
    monkeypatch.setattr(publication, "merge_iteration", counted)
    return counted


def merged_ahead(
    merges: RecordedMerges, view: IterationView, *, writing: bool = True
) -> OrderPremerger:
    premerger = OrderPremerger(lambda _: view)
    premerger.is_writing = writing
    premerger.thread.start()
    if writing:
        assert merges.merged.wait(PATIENCE_S)
    premerger.thread.stop()
    premerger.thread.stop()
    return premerger


def test_premerger_returns_order_merged_ahead(merges):
    """A new view with the same batches is equal."""
    premerger = merged_ahead(merges, VIEW)
    order = premerger.merge_view(dataclasses.replace(VIEW, stalls={0: 5}))
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
    """More events, a span or a late rank may change the order."""
    premerger = merged_ahead(merges, VIEW)
    now = dataclasses.replace(VIEW, **change)
    premerger.merge_view(now)
    assert merges.views == [VIEW, now]


def test_premerger_is_idle_while_nothing_is_written(merges):
    premerger = merged_ahead(merges, VIEW, writing=False)
    assert merges.views == []
    premerger.merge_view(VIEW)
    assert merges.views == [VIEW]


def test_premerger_raises_failed_merge_when_view_is_requested(monkeypatch):
    """The failure is counted then."""
    tried = threading.Event()

    def broken(_view: IterationView) -> GlobalOrder:
        tried.set()
        raise IndexError("a bug")

    monkeypatch.setattr(publication, "merge_iteration", broken)
    premerger = OrderPremerger(lambda _: VIEW)
    premerger.is_writing = True
    premerger.thread.start()
    assert tried.wait(PATIENCE_S)
    premerger.thread.stop()
    with pytest.raises(IndexError):
        premerger.merge_view(VIEW)
