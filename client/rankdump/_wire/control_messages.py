"""Conversion between messages that control a running job and frozen values."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from rankdump._core.job_control import (
    ControlAction,
    ControlAnswer,
    ControlOrder,
    ControlResult,
)
from rankdump._wire.message_fields import (
    MAX_NAME_CHARACTERS,
    check_count,
    check_numbers,
    check_text,
    from_message,
    make_fields,
    make_printable,
    make_sendable,
)
from rankdump._wire.session_messages import MAX_JOB_ID_CHARACTERS, MAX_WORLD_SIZE
from rankdump.errors import ProtocolError
from rankdump.wire.v1 import control_pb2, coordinator_pb2

MAX_ID_CHARACTERS = 128
_MAX_VALUES = 1000
_MAX_VALUE_CHARACTERS = 1 << 16
_MAX_REASON_CHARACTERS = 1024


def order_to_wire(order: ControlOrder) -> control_pb2.ControlOrder:
    """Return the message of an order."""
    return control_pb2.ControlOrder(**make_fields(order, replace=True))


def order_from_wire(message: control_pb2.ControlOrder) -> ControlOrder:
    """Convert the message of an order; ProtocolError for an unknown action or numbers out of
    bounds.
    """
    iteration = message.iteration if message.HasField("iteration") else None
    check_numbers("order", (iteration or 0,))
    return replace(control_request_from_wire(message), iteration=iteration)


def control_request_to_wire(order: ControlOrder) -> coordinator_pb2.JobControlRequest:
    """Return the request to a coordinator for an order, whose iteration the coordinator chooses."""
    return coordinator_pb2.JobControlRequest(**make_fields(order, "iteration", replace=True))


def control_request_from_wire(
    message: coordinator_pb2.JobControlRequest | control_pb2.ControlOrder,
) -> ControlOrder:
    """Convert a request to a coordinator; ProtocolError for an unknown action."""
    if not message.id or not message.job_id:
        raise ProtocolError("an order needs an id and a job id")
    check_text("id of an order", message.id, MAX_ID_CHARACTERS)
    check_text("job id", message.job_id, MAX_JOB_ID_CHARACTERS)
    check_count("values of an order", len(message.values), _MAX_VALUES)
    for value in message.values:
        check_text("value of an order", value, _MAX_VALUE_CHARACTERS)
    words = [each.value for each in ControlAction]
    if message.action not in words:
        allowed = ", ".join(words)
        raise ProtocolError(f"the action {message.action[:80]!r} is unknown; known: {allowed}")
    return from_message(ControlOrder, message, action=ControlAction(message.action), iteration=None)


def answer_to_wire(answer: ControlAnswer) -> control_pb2.ControlAnswer:
    """Return the message of an answer."""
    refused, note = (
        make_sendable(text, _MAX_REASON_CHARACTERS) for text in (answer.refused, answer.note)
    )
    fields = make_fields(answer, "refused", "note")
    return control_pb2.ControlAnswer(**fields, refused=refused, note=note)


def answer_from_wire(message: control_pb2.ControlAnswer) -> ControlAnswer:
    """Convert the message of an answer; ProtocolError if a number or a text is out of bounds."""
    check_text("id of an order", message.id, MAX_ID_CHARACTERS)
    check_text("job id", message.job_id, MAX_JOB_ID_CHARACTERS)
    check_text("session id", message.session_id, MAX_NAME_CHARACTERS)
    numbers = (message.iteration, message.step_us, message.pending, message.begun)
    check_numbers("answer to an order", numbers)
    if message.rank >= MAX_WORLD_SIZE:
        raise ProtocolError(f"an answer to an order is of rank {message.rank}")
    return from_message(
        ControlAnswer,
        message,
        refused=make_printable(message.refused, _MAX_REASON_CHARACTERS),
        note=make_printable(message.note, _MAX_REASON_CHARACTERS),
    )


def result_to_wire(result: ControlResult) -> coordinator_pb2.JobControlResponse:
    """Return the message of the result of an order."""
    return coordinator_pb2.JobControlResponse(**make_fields(result))


result_from_wire = partial(from_message, ControlResult)
