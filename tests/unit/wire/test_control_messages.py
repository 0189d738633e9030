"""Tests of messages that control a job: what they carry, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rankdump._core.job_control import (
    ControlAction,
    ControlAnswer,
    ControlledRank,
    ControlOrder,
    ControlResult,
)
from rankdump._wire.control_messages import (
    answer_from_wire,
    answer_to_wire,
    control_request_from_wire,
    control_request_to_wire,
    order_from_wire,
    order_to_wire,
    result_from_wire,
    result_to_wire,
)
from rankdump.errors import ProtocolError
from rankdump.wire.v1 import control_pb2

ORDER = ControlOrder("o", "job", ControlAction.OPERATORS, ("conv", "name-regex(a)"))
ANSWER = ControlAnswer("o", True, 7, 1500, "no", 9, "job", 3, "s3")


@pytest.mark.parametrize("iteration", [None, 0, 12])
def test_orders_arrive_as_they_were_sent(iteration):
    order = ControlOrder("o", "job", ControlAction.STOP, (), iteration)
    assert order_from_wire(order_to_wire(order)) == order
    assert control_request_from_wire(control_request_to_wire(ORDER)) == ORDER


def test_answers_and_results_arrive_as_they_were_sent():
    for answer in (ANSWER, replace(ANSWER, begun=0), replace(ANSWER, begun=5, note="'a' none")):
        assert answer_from_wire(answer_to_wire(answer)) == answer
    for result in (
        ControlResult(
            3, (ControlledRank(0, None, "silent", True), ControlledRank(1, 3, "", note="n"))
        ),
        ControlResult(None, (ControlledRank(0, None, "gone"),)),
        ControlResult(0, (ControlledRank(0, 0), ControlledRank(1, 4, "late"))),
    ):
        assert result_from_wire(result_to_wire(result)) == result


@pytest.mark.parametrize(
    "fields",
    [
        {"action": "explode"},
        {"id": ""},
        {"job_id": ""},
        {"id": "x" * 1000},
        {"iteration": 1 << 63},
        {"values": ["a"] * 1001},
        {"values": ["a\0"]},
    ],
)
def test_orders_out_of_bounds_are_refused(fields):
    whole = {"id": "o", "job_id": "job", "action": "stop"} | fields
    with pytest.raises(ProtocolError):
        order_from_wire(control_pb2.ControlOrder(**whole))


@pytest.mark.parametrize(
    "fields",
    [
        {"iteration": 1 << 63},
        {"step_us": 1 << 63},
        {"rank": 1 << 31},
        {"id": "x" * 1000},
        {"begun": 1 << 63},
    ],
)
def test_answers_out_of_bounds_are_refused(fields):
    with pytest.raises(ProtocolError):
        answer_from_wire(control_pb2.ControlAnswer(**fields))


def test_reason_is_printable():
    answer = answer_from_wire(control_pb2.ControlAnswer(refused="a\x1b[31m", note="b\n"))
    assert answer.refused.isprintable()
    assert answer.note.isprintable()
