"""Orders that control a job, on their way from the coordinator to the ranks of this agent, and the
answers on their way back.

The coordinator repeats an order in each of its answers until it has what it needs, and the agent
repeats the ranks' answers as long: a stream or a process that ends in between loses nothing, and a
rank carries an order out once.
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
"""Orders at a time: one for each job."""
RESEND_INTERVAL_S = 2.0
"""An order that a rank has not answered for so long is sent to it again."""
EARLIER_RELEASE = "its process uses an earlier release of rankdump"

_OrderKey: TypeAlias = "tuple[str, bool]"
"""Id of an order, and whether it has an iteration."""


@dataclass(slots=True)
class _RelayedOrder:
    """An order that ranks have yet to answer, and what they answered."""

    order: ControlOrder
    sent_s: dict[str, float] = field(default_factory=dict[str, float])
    """When each session had it sent last."""
    answers: dict[str, ControlAnswer] = field(default_factory=dict[str, ControlAnswer])


class OrderRelay:
    """Orders that the coordinator repeats; safe to use from several threads."""

    def __init__(
        self,
        list_sessions: Callable[[], Iterable[RankSession]],
        on_answer: Callable[[], None],
        *,
        find_newest: Callable[[RankSession], int | str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_answer` is called when there is an answer to be reported. `find_newest` returns the
        newest iteration in the black box of a session, or why it has none.
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
        """Pass on the orders that the coordinator has now; those that it has no more are over."""
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
        """Take the answer of a rank; one to an order that is over is not kept."""
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
        """Send an order to the ranks that have not had it; return whether one was answered here."""
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
            # Again after a while: a stream that ends takes along what it has not delivered.
            since_s = self._clock() - relayed.sent_s.get(session_id, -math.inf)
            if since_s >= RESEND_INTERVAL_S and session.send_order(order):
                relayed.sent_s[session_id] = self._clock()
        return answered

    def _answer_for(self, session: RankSession, order: ControlOrder) -> ControlAnswer | None:
        """Return what the agent answers in the place of a rank; None if the rank is to answer.

        The agent freezes what it holds of a rank, whatever the rank does or understands.
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
