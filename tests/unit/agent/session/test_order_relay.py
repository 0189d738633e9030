"""Tests of orders on their way through an agent: repeated both ways, lost nowhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rankdump._core.job_control import ControlAction, ControlAnswer, ControlOrder
from rankdump._core.plan import DumpPlan, OutputSettings
from rankdumpd.agent.session.order_relay import RESEND_INTERVAL_S, OrderRelay
from rankdumpd.agent.session.rank_session import RankSession

ORDER = ControlOrder("o", "job", ControlAction.STOP)
LATER = replace(ORDER, iteration=9)
PLAN = DumpPlan(OutputSettings("/x"))


class CollectingListener:
    """The stream of a rank, which keeps orders."""

    at_rest = True

    def __init__(self) -> None:
        self.orders: list[ControlOrder] = []

    def send_order(self, order: ControlOrder) -> None:
        self.orders.append(order)

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


class RelayRig:
    """A relay with sessions, and a clock that a test sets."""

    def __init__(self, make_request) -> None:
        self._make_request = make_request
        self.now_s = 0.0
        self.sessions: list[RankSession] = []
        self.answered = 0
        self.newest: dict[str, int] = {}
        """Newest iteration in the black box of each session that has one."""
        self.relay = OrderRelay(
            lambda: self.sessions,
            self._count,
            find_newest=lambda session: self.newest.get(session.request.session_id, "no box"),
            clock=lambda: self.now_s,
        )

    def _count(self) -> None:
        self.answered += 1

    def add_session(self, rank: int, *, connects: bool = True, **fields) -> CollectingListener:
        about = {"session_id": f"s{rank}", "rank": rank, "takes_orders": True, **fields}
        session = RankSession(replace(self._make_request(), world_size=8, **about), PLAN)
        listener: Any = CollectingListener()
        if connects:
            session.connect(listener)
        self.sessions.append(session)
        return listener


@pytest.fixture
def rig(make_request) -> RelayRig:
    return RelayRig(make_request)


def test_order_reaches_the_ranks_of_its_job_once(rig):
    mine, other = rig.add_session(0), rig.add_session(1, job_id="another")
    for _ in range(3):
        rig.relay.take_orders([ORDER])
    assert (mine.orders, other.orders) == ([ORDER], [])
    rig.relay.take_orders([LATER])
    assert mine.orders == [ORDER, LATER]


def test_answers_are_repeated_until_the_order_is_over(rig):
    rig.add_session(0)
    rig.relay.take_orders([ORDER])
    rig.relay.take_answer(rig.sessions[0], ControlAnswer("o", False, 7, 1000))
    (answer,) = rig.relay.list_answers()
    assert (answer.job_id, answer.rank, answer.session_id) == ("job", 0, "s0")
    assert (rig.relay.list_answers(), rig.answered, rig.relay.is_busy) == ([answer], 1, True)
    rig.relay.take_orders([])
    assert (rig.relay.list_answers(), rig.relay.is_busy) == ([], False)
    rig.relay.take_answer(rig.sessions[0], ControlAnswer("o", False, 8))
    assert rig.relay.list_answers() == []


def test_order_without_an_answer_is_sent_again(rig):
    """What a stream had not delivered when it ended comes over the next one."""
    listener = rig.add_session(0)
    rig.relay.take_orders([ORDER])
    rig.now_s += RESEND_INTERVAL_S
    rig.relay.take_orders([ORDER])
    assert listener.orders == [ORDER, ORDER]


def test_rank_that_connects_later_gets_the_order(rig):
    rig.add_session(0, connects=False)
    rig.relay.take_orders([ORDER])
    listener: Any = CollectingListener()
    rig.sessions[0].connect(listener)
    rig.relay.take_orders([ORDER])
    assert listener.orders == [ORDER]


def test_rank_of_an_earlier_release_is_answered_for(rig):
    listener = rig.add_session(0, takes_orders=False)
    rig.relay.take_orders([LATER])
    rig.relay.take_orders([LATER])
    (answer,) = rig.relay.list_answers()
    assert (answer.applied, answer.session_id, listener.orders) == (True, "s0", [])
    assert "earlier release" in answer.refused
    assert rig.answered == 1


def test_agent_answers_for_its_ranks_what_it_can_freeze(rig):
    """Also for those that hang, have ended, or are of an earlier release."""
    listeners = [rig.add_session(0), rig.add_session(1, takes_orders=False), rig.add_session(2)]
    rig.add_session(3, connects=False)
    rig.sessions[3].mark_lost()
    rig.newest = {"s0": 7, "s1": 8, "s3": 6}
    freeze = replace(ORDER, action=ControlAction.FREEZE)
    for _ in range(2):
        rig.relay.take_orders([freeze])
    answers = {each.rank: (each.iteration, each.refused) for each in rig.relay.list_answers()}
    assert answers == {0: (7, ""), 1: (8, ""), 2: (0, "no box"), 3: (6, "")}
    assert [each.orders for each in listeners] == [[], [], []]
    assert rig.answered == 1
