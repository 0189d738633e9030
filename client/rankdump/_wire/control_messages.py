"""Messages that control a running job, in both directions."""

from __future__ import annotations

from collections.abc import Sequence

from rankdump._core.job_control import (
    ControlAction,
    ControlAnswer,
    ControlledRank,
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
    replace_surrogates,
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
    return control_pb2.ControlOrder(
        action=order.action.value, **make_fields(order, "action", replace=True)
    )


def order_from_wire(message: control_pb2.ControlOrder) -> ControlOrder:
    """Read an order; ProtocolError for an unknown action, or numbers out of bounds."""
    iteration = message.iteration if message.HasField("iteration") else None
    check_numbers("order", (iteration or 0,))
    order = _read_order(message.id, message.job_id, message.action, message.values)
    return ControlOrder(order.id, order.job_id, order.action, order.values, iteration)


def control_request_to_wire(order: ControlOrder) -> coordinator_pb2.JobControlRequest:
    """Return the request to a coordinator; it chooses the iteration."""
    return coordinator_pb2.JobControlRequest(
        action=order.action.value, **make_fields(order, "action", "iteration", replace=True)
    )


def control_request_from_wire(message: coordinator_pb2.JobControlRequest) -> ControlOrder:
    """Read a request to a coordinator; ProtocolError for an unknown action."""
    return _read_order(message.id, message.job_id, message.action, message.values)


def _read_order(order_id: str, job_id: str, action: str, values: Sequence[str]) -> ControlOrder:
    if not order_id or not job_id:
        raise ProtocolError("an order needs an id and a job id")
    check_text("id of an order", order_id, MAX_ID_CHARACTERS)
    check_text("job id", job_id, MAX_JOB_ID_CHARACTERS)
    check_count("values of an order", len(values), _MAX_VALUES)
    for value in values:
        check_text("value of an order", value, _MAX_VALUE_CHARACTERS)
    words = [each.value for each in ControlAction]
    if action not in words:
        allowed = ", ".join(words)
        raise ProtocolError(f"the action {action[:80]!r} is unknown; known: {allowed}")
    return ControlOrder(order_id, job_id, ControlAction(action), tuple(values))


def answer_to_wire(answer: ControlAnswer) -> control_pb2.ControlAnswer:
    """Return the message of an answer."""
    refused, note = (
        make_sendable(replace_surrogates(text), _MAX_REASON_CHARACTERS)
        for text in (answer.refused, answer.note)
    )
    fields = make_fields(answer, "refused", "note")
    return control_pb2.ControlAnswer(**fields, refused=refused, note=note)


def answer_from_wire(message: control_pb2.ControlAnswer) -> ControlAnswer:
    """Read an answer; ProtocolError when a number or a text is out of bounds."""
    check_text("id of an order", message.id, MAX_ID_CHARACTERS)
    check_text("job id", message.job_id, MAX_JOB_ID_CHARACTERS)
    check_text("session id", message.session_id, MAX_NAME_CHARACTERS)
    numbers = (message.iteration, message.step_us, message.pending, message.begun)
    check_numbers("answer to an order", numbers)
    if message.rank >= MAX_WORLD_SIZE:
        raise ProtocolError(f"an answer to an order is of rank {message.rank}")
    return ControlAnswer(
        id=message.id,
        applied=message.applied,
        iteration=message.iteration,
        step_us=message.step_us,
        refused=make_printable(message.refused, _MAX_REASON_CHARACTERS),
        pending=message.pending,
        begun=message.begun if message.HasField("begun") else None,
        note=make_printable(message.note, _MAX_REASON_CHARACTERS),
        job_id=message.job_id,
        rank=message.rank,
        session_id=message.session_id,
    )


def result_to_wire(result: ControlResult) -> coordinator_pb2.JobControlResponse:
    """Return the message of a result."""
    ranks = [coordinator_pb2.ControlledRank(**make_fields(each)) for each in result.ranks]
    return coordinator_pb2.JobControlResponse(iteration=result.iteration, ranks=ranks)


def result_from_wire(message: coordinator_pb2.JobControlResponse) -> ControlResult:
    """Read a result."""
    ranks = tuple(from_message(ControlledRank, each) for each in message.ranks)
    return ControlResult(message.iteration if message.HasField("iteration") else None, ranks)
