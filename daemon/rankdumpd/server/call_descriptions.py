"""Fields of the audit log that describe the requests and answers of calls. Pure."""

from __future__ import annotations

from rankdump._core.plan import plan_from_json
from rankdump.errors import RankdumpError
from rankdump.wire.v1 import agent_pb2, coordinator_pb2


def describe_request(message: object) -> dict[str, object]:
    """Return the fields of an audit line that describe a request."""
    if isinstance(message, agent_pb2.OpenSessionRequest):
        return {
            "job": message.job_id,
            "session": message.session_id,
            "rank": message.rank,
            "root": _read_plan_root(message.plan_json),
        }
    if isinstance(message, agent_pb2.PushRequest):
        return {"session": message.hello.session_id}
    if isinstance(message, agent_pb2.ControlRequest):
        return _describe_action(message)
    if isinstance(message, coordinator_pb2.JobControlRequest):
        action = " ".join((message.action, *message.values))
        return {"action": action, "job": message.job_id, "order": message.id}
    if isinstance(message, coordinator_pb2.ReportRequest):
        return {"agent": message.agent_id, "host": message.host}
    with_job = (
        coordinator_pb2.CoordinatorStatusRequest,
        coordinator_pb2.OrderRequest,
        coordinator_pb2.HintsRequest,
    )
    return {"job": message.job_id} if isinstance(message, with_job) else {}


def describe_answer(message: object) -> dict[str, object]:
    """Return the fields of an audit line that only the answer to a request has."""
    if not isinstance(message, coordinator_pb2.JobControlResponse):
        return {}
    unchanged = [each.rank for each in message.ranks if not each.HasField("iteration")]
    begin = message.iteration if message.HasField("iteration") else None
    return {"iteration": begin, "unchanged_ranks": unchanged}


def _describe_action(message: agent_pb2.ControlRequest) -> dict[str, object]:
    if message.HasField("pin"):
        action = "pin" if message.pin.pinned else "unpin"
        return {"action": action, "job": message.pin.job_id}
    if message.HasField("freeze"):
        return {"action": "freeze", "job": message.freeze.job_id}
    return {"action": "drain" if message.HasField("drain") else "none"}


def _read_plan_root(plan_json: bytes) -> str:
    try:
        return plan_from_json(plan_json).output.root
    except RankdumpError:
        return ""
