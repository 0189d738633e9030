"""Tests of controls under way: two rounds of answers, repetitions, and one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from rankdump._core.freeze_record import FreezeReach, UnreachedAgent
from rankdump._core.job_control import ControlAction, ControlAnswer, ControlOrder, ControlResult
from rankdump.errors import RejectedError, UnavailableError
from rankdumpd.coordinator.control import ControlledSession, JobControl

ORDER = ControlOrder("order-1", "job", ControlAction.STOP)
SESSIONS = (ControlledSession(0, "s0", ""), ControlledSession(1, "s1", ""))


class ControlThread:
    """A caller that waits for the result of an order."""

    def __init__(self, control: JobControl, order: ControlOrder = ORDER) -> None:
        self.result: ControlResult | Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(control, order))
        self._thread.start()

    def _run(self, control: JobControl, order: ControlOrder) -> None:
        try:
            self.result = control.control(order, lambda: SESSIONS)
        except Exception as error:
            self.result = error

    def join(self) -> ControlResult | Exception | None:
        self._thread.join(60)
        return self.result


def refuse_freeze(order: ControlOrder, iteration: int) -> Callable[[], FreezeReach]:
    raise AssertionError(f"{order} freezes {iteration}")


def wait_until(is_done: Callable[[], bool]) -> None:
    event = threading.Event()
    for _ in range(6000):
        if is_done():
            return
        event.wait(0.01)
    raise AssertionError("it never happened")


def ask(control: JobControl) -> int | None:
    """Return the iteration of the order that agents get now."""
    (order,) = control.list_orders()
    return order.iteration


def answer(session: str, iteration: int, *, applied: bool, **fields) -> ControlAnswer:
    return ControlAnswer(
        ORDER.id, applied, iteration, 1_000_000, job_id="job", session_id=session, **fields
    )


def answer_first_round(control: JobControl) -> int:
    wait_until(lambda: bool(control.list_orders()))
    control.add_answers([answer("s0", 7, applied=False), answer("s1", 9, applied=False)])
    wait_until(lambda: ask(control) is not None)
    begin = ask(control)
    assert begin is not None
    return begin


def answer_second_round(control: JobControl, begin: int) -> None:
    control.add_answers([answer(each, begin, applied=True) for each in ("s0", "s1")])


def test_all_ranks_begin_where_the_farthest_can():
    control = JobControl(refuse_freeze, round_timeout_s=60)
    caller = ControlThread(control)
    begin = answer_first_round(control)
    assert begin > 9
    # Repeated answers of the first round change nothing.
    control.add_answers([answer("s0", 50, applied=False)])
    assert ask(control) == begin
    answer_second_round(control, begin)
    result = caller.join()
    assert isinstance(result, ControlResult)
    assert [(each.rank, each.iteration) for each in result.ranks] == [(0, begin), (1, begin)]
    assert control.list_orders() == ()


def test_same_order_is_carried_out_once():
    """Whoever repeats a call gets the result of the first one, also while it is under way."""
    control = JobControl(refuse_freeze, round_timeout_s=60)
    callers = [ControlThread(control)]
    begin = answer_first_round(control)
    callers.append(ControlThread(control))
    answer_second_round(control, begin)
    first, second = (each.join() for each in callers)
    assert first == second == control.control(ORDER, lambda: SESSIONS)


def test_another_control_of_the_job_is_refused_meanwhile():
    control = JobControl(refuse_freeze, round_timeout_s=60)
    caller = ControlThread(control)
    begin = answer_first_round(control)
    with pytest.raises(RejectedError, match="'job' is being controlled by somebody else"):
        control.control(replace(ORDER, id="order-2"), lambda: SESSIONS)
    answer_second_round(control, begin)
    assert isinstance(caller.join(), ControlResult)


def test_ranks_that_do_not_answer_are_named_in_time():
    control = JobControl(refuse_freeze, round_timeout_s=0.2)
    caller = ControlThread(control)
    result = caller.join()
    assert isinstance(result, ControlResult)
    assert result.iteration is None
    assert all(each.reason.startswith("no answer") for each in result.ranks)


def test_job_without_able_ranks_is_not_changed():
    control = JobControl(refuse_freeze, round_timeout_s=60)
    caller = ControlThread(control)
    wait_until(lambda: bool(control.list_orders()))
    control.add_answers([answer(s, 3, applied=False, refused="no") for s in ("s0", "s1", "s9")])
    result = caller.join()
    assert isinstance(result, ControlResult)
    assert (result.iteration, {each.reason for each in result.ranks}) == (None, {"no"})


def test_unknown_job_leaves_nothing_behind():
    control = JobControl(refuse_freeze)

    def fail() -> tuple[ControlledSession, ...]:
        raise RejectedError("job 'job' has not reported")

    for _ in range(2):
        with pytest.raises(RejectedError, match="not reported"):
            control.control(ORDER, fail)
    assert control.list_orders() == ()


@pytest.mark.parametrize("refusal", ["", "it was frozen 3 s ago"])
def test_freeze_is_that_of_the_latest_iteration(refusal: str):
    """Ranks are asked where they are; those of an agent that does not freeze are named."""
    frozen: list[tuple[ControlOrder, int]] = []
    unreached = (UnreachedAgent("far", (1,), refusal),) if refusal else ()

    def freeze(order: ControlOrder, iteration: int) -> Callable[[], FreezeReach]:
        frozen.append((order, iteration))
        return lambda: FreezeReach(2, 2 - len(unreached), unreached)

    clock = iter(range(1000))
    control = JobControl(freeze, round_timeout_s=60, clock=lambda: float(next(clock)))
    asked = replace(ORDER, action=ControlAction.FREEZE)
    caller = ControlThread(control, asked)
    wait_until(lambda: bool(control.list_orders()))
    control.add_answers([answer("s0", 7, applied=False), answer("s1", 9, applied=False)])
    result = caller.join()
    assert isinstance(result, ControlResult)
    assert frozen == [(asked, 9)]
    assert [(each.rank, each.iteration, each.reason) for each in result.ranks] == [
        (0, 9, ""),
        (1, None if refusal else 9, refusal),
    ]


@pytest.mark.parametrize("rounds", [1, 2])
def test_controls_end_when_the_coordinator_stops(rounds: int):
    control = JobControl(refuse_freeze, round_timeout_s=60)
    caller = ControlThread(control)
    if rounds == 2:
        answer_first_round(control)
    wait_until(lambda: bool(control.list_orders()))
    control.stop()
    error = caller.join()
    assert isinstance(error, UnavailableError)
    assert str(error) == "the coordinator stops"


def test_stop_leaves_time_to_an_order_that_was_given_out():
    control = JobControl(refuse_freeze, round_timeout_s=60)
    caller = ControlThread(control)
    begin = answer_first_round(control)
    stopping = threading.Thread(target=control.stop, args=(60.0,))
    stopping.start()
    answer_second_round(control, begin)
    stopping.join()
    assert isinstance(caller.join(), ControlResult)
