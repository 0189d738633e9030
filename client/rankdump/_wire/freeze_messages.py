"""Messages between agents and coordinator about freezes and finished steps, in both directions;
bounds are checked on receipt.
"""

from __future__ import annotations

from rankdump._core.black_box import FaultKind, RankStep
from rankdump._core.freeze_record import (
    FreezeReach,
    FrozenCause,
    JobFreeze,
    RelayedFreeze,
    UnreachedAgent,
)
from rankdump._wire.black_box_messages import FAULT_WORDS
from rankdump._wire.message_fields import (
    MAX_LINE_CHARACTERS,
    MAX_NAME_CHARACTERS,
    check_count,
    check_numbers,
    check_text,
    from_message,
    make_fields,
    make_printable,
    make_sendable,
)
from rankdump._wire.session_messages import MAX_JOB_ID_CHARACTERS, check_rank
from rankdump.errors import ProtocolError
from rankdump.wire.v1 import coordinator_pb2

MAX_STEP_NUMBERS = 64
"""Numbers of a step that are compared with those of other ranks."""
MAX_UNREACHED_AGENTS = 64
MAX_UNREACHED_RANKS = 1024
"""Of one agent."""
MAX_LATER_CAUSES = 16
"""Causes that a coordinator adds to one freeze."""
_TEXTS = ("text", "op_type", "op_name", "side", "argument", "source")


def job_freeze_to_wire(freeze: JobFreeze) -> coordinator_pb2.JobFreeze:
    """Return the message of a freeze."""
    return coordinator_pb2.JobFreeze(
        **make_fields(freeze, "cause", "refusal"),
        cause=_cause_to_wire(freeze.cause),
        refusal=make_sendable(freeze.refusal),
    )


def _cause_to_wire(cause: FrozenCause) -> coordinator_pb2.FreezeCause:
    fields = make_fields(cause)
    fields |= {name: make_sendable(fields[name]) for name in _TEXTS}
    return coordinator_pb2.FreezeCause(**fields)


def is_known_freeze(message: coordinator_pb2.JobFreeze) -> bool:
    """Return whether a freeze is of a kind that this version knows.

    Another one comes from a later version, and is left out: everything else in the message counts.
    """
    return message.cause.kind in FAULT_WORDS


def job_freeze_from_wire(message: coordinator_pb2.JobFreeze) -> JobFreeze:
    """Read a freeze; ProtocolError for an unknown word, or a number that is too large."""
    _check_job("freeze", message.job_id)
    check_numbers("freeze", (message.iteration,))
    cause, refusal = _read_cause(message.cause), _read_text(message.refusal)
    return from_message(JobFreeze, message, cause=cause, refusal=refusal)


def _read_cause(cause: coordinator_pb2.FreezeCause) -> FrozenCause:
    check_numbers("freeze", (cause.iteration, cause.at_us))
    if cause.kind not in FAULT_WORDS:
        raise ProtocolError(f"a freeze has the unknown kind {cause.kind[:80]!r}")
    check_rank("freeze", cause.rank)
    texts = {name: _read_text(getattr(cause, name)) for name in _TEXTS}
    return from_message(FrozenCause, cause, kind=FaultKind(cause.kind), **texts)


def relayed_freeze_to_wire(relayed: RelayedFreeze) -> coordinator_pb2.RelayedFreeze:
    """Return the message of a freeze for the agents of its job."""
    reach = relayed.reach
    return coordinator_pb2.RelayedFreeze(
        freeze=job_freeze_to_wire(relayed.freeze),
        agents=reach.agents,
        frozen_agents=reach.frozen_agents,
        unreached=[coordinator_pb2.UnreachedAgent(**make_fields(each)) for each in reach.unreached],
        later_causes=map(_cause_to_wire, relayed.later_causes),
    )


def relayed_freeze_from_wire(message: coordinator_pb2.RelayedFreeze) -> RelayedFreeze:
    """Read a freeze that a coordinator hands on; ProtocolError when it contradicts itself."""
    check_count(
        "agents that a freeze has not reached", len(message.unreached), MAX_UNREACHED_AGENTS
    )
    unreached = tuple(map(_read_unreached, message.unreached))
    reach = FreezeReach(message.agents, message.frozen_agents, unreached)
    check_count("later causes of a freeze", len(message.later_causes), MAX_LATER_CAUSES)
    # Those of kinds that only a later version knows are left out, as such freezes are.
    later = (each for each in message.later_causes if each.kind in FAULT_WORDS)
    freeze = job_freeze_from_wire(message.freeze)
    return RelayedFreeze(freeze, reach, tuple(map(_read_cause, later)))


def rank_step_to_wire(step: RankStep) -> coordinator_pb2.RankStep:
    """Return the message of a step."""
    return coordinator_pb2.RankStep(**make_fields(step))


def rank_step_from_wire(message: coordinator_pb2.RankStep) -> RankStep:
    """Read a step; ProtocolError when it has too many numbers, or one of them too long a name."""
    _check_job("step", message.job_id)
    check_numbers("step", (message.iteration,))
    check_count("numbers of a step", len(message.numbers), MAX_STEP_NUMBERS)
    for name in message.numbers:
        check_text("number of a step", name, MAX_LINE_CHARACTERS)
    check_rank("step", message.rank)
    return from_message(RankStep, message)


def _read_unreached(message: coordinator_pb2.UnreachedAgent) -> UnreachedAgent:
    check_count(
        "ranks of an agent that a freeze has not reached", len(message.ranks), MAX_UNREACHED_RANKS
    )
    for rank in message.ranks:
        check_rank("freeze", rank)
    reason = _read_text(message.reason)
    return from_message(UnreachedAgent, message, host=make_printable(message.host), reason=reason)


def _read_text(text: str) -> str:
    return make_printable(check_text("text of a freeze", text), MAX_NAME_CHARACTERS)


def _check_job(what: str, job_id: str) -> None:
    if not job_id:
        raise ProtocolError(f"a {what} without a job id")
    check_text(f"{what} with a job id", job_id, MAX_JOB_ID_CHARACTERS)
