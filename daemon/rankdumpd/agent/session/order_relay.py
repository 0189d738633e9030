"""Relay of orders that control a job, from the coordinator to the ranks of this agent, and of the
answers back.

The coordinator repeats an order in each of its answers until it has all answers of ranks, and the
agent repeats the ranks' answers for as long. So nothing is lost when a stream or a process ends in
between, and a rank carries out an order only once.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from rankdump._core.job_control import ControlAction, ControlAnswer, ControlOrder
from rankdumpd.agent.session.rank_session import RankSession

MAX_ORDERS = 64
"""Largest number of orders at a time; there is one for each job."""
RESEND_INTERVAL_S = 2.0
"""Seconds without an answer after which an order is sent to a rank again."""
EARLIER_RELEASE = "its process uses an earlier release of rankdump"

_OrderKey: TypeAlias = "tuple[str, bool]"
"""Id of an order, and whether the order has an iteration."""


@dataclass(slots=True)
class _RelayedOrder:
    """An order that ranks have yet to answer, with the answers so far."""

    order: ControlOrder
    sent_s: dict[str, float] = field(default_factory=dict[str, float])
    """Time at which the order was last sent to each session."""
    answers: dict[str, ControlAnswer] = field(default_factory=dict[str, ControlAnswer])


class OrderRelay:
    """Relays the orders that the coordinator repeats; safe to use from several threads."""

    def __init__(
        self,
        list_sessions: Callable[[], Iterable[RankSession]],
        on_answer: Callable[[], None],
        *,
        find_newest: Callable[[RankSession], int | str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_answer` is called when there is an answer to report. `find_newest` returns the newest
        iteration in the black box of a session, or why there is none.
        """
        self._list_sessions, self._on_answer, self._clock = list_sessions, on_answer, clock
        self._find_newest = find_newest
        self._lock = threading.Lock()
        self._orders: dict[_OrderKey, _RelayedOrder] = {}

    @property
    def is_busy(self) -> bool:
        """Whether the coordinator waits for answers, or will soon send the next order."""
        return bool(self._orders)

    def take_orders(self, orders: Sequence[ControlOrder]) -> None:
        """Send the coordinator's present orders to their ranks; orders that are not among them are
        over.
        """
        with self._lock:
            keys = {(each.id, each.iteration is not None): each for each in orders[:MAX_ORDERS]}
            self._orders = {
                key: self._orders.get(key) or _RelayedOrder(order) for key, order in keys.items()
            }
            relayed = list(self._orders.values())
        found = [self._pass_on(each) for each in relayed]
        if any(found):
            self._on_answer()

    def take_answer(self, session: RankSession, answer: ControlAnswer) -> None:
        """Store the answer of a rank; an answer to an order that is over is ignored."""
        with self._lock:
            relayed = self._orders.get((answer.id, answer.applied))
            if relayed is None:
                return
            relayed.answers[session.request.session_id] = _sign_answer(session, answer)
        self._on_answer()

    def list_answers(self) -> list[ControlAnswer]:
        """Return all answers to the present orders."""
        with self._lock:
            return [each for order in self._orders.values() for each in order.answers.values()]

    def _pass_on(self, relayed: _RelayedOrder) -> bool:
        """Send an order to the ranks that have not received it; return whether this agent answered
        for one.
        """
        order, answered = relayed.order, False
        for session in self._list_sessions():
            session_id = session.request.session_id
            if session.request.job_id != order.job_id or session_id in relayed.answers:
                continue
            answer = self._answer_for(session, order)
            if answer is not None:
                with self._lock:
                    relayed.answers[session_id] = _sign_answer(session, answer)
                answered = True
            if answer is not None or session.has_ended:
                continue
            # Sent again after a while, because the end of a stream loses what was not delivered.
            since_s = self._clock() - relayed.sent_s.get(session_id, -math.inf)
            if since_s >= RESEND_INTERVAL_S and session.send_order(order):
                relayed.sent_s[session_id] = self._clock()
        return answered

    def _answer_for(self, session: RankSession, order: ControlOrder) -> ControlAnswer | None:
        """Return the answer that this agent gives for a rank; None if the rank has to answer.

        The agent freezes the steps that it holds of a rank, whatever the rank does or supports.
        """
        applied, refused = order.iteration is not None, EARLIER_RELEASE
        if order.action is ControlAction.FREEZE:
            newest = self._find_newest(session)
            if not isinstance(newest, str):
                return ControlAnswer(order.id, applied, newest)
            refused = newest
        elif session.has_ended or session.request.takes_orders:
            return None
        return ControlAnswer(order.id, applied, 0, refused=refused)


def _sign_answer(session: RankSession, answer: ControlAnswer) -> ControlAnswer:
    request = session.request
    return replace(answer, job_id=request.job_id, rank=request.rank, session_id=request.session_id)
