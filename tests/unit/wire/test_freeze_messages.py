"""Messages of freezes and compared steps to values and back, and hostile ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.wire_round_trip import lines, names, sent, uint32, uint63

from rankdump._core.black_box import FaultKind, RankStep
from rankdump._core.freeze_record import (
    FreezeReach,
    FrozenCause,
    JobFreeze,
    RelayedFreeze,
    UnreachedAgent,
)
from rankdump._wire.black_box_messages import (
    MAX_LATER_CAUSES,
    MAX_UNREACHED_AGENTS,
    MAX_UNREACHED_RANKS,
    is_known_freeze,
    rank_step_from_wire,
    rank_step_to_wire,
    relayed_freeze_from_wire,
    relayed_freeze_to_wire,
)
from rankdump.errors import ProtocolError
from rankdump.wire.v1 import coordinator_pb2 as pb

ranks = st.integers(0, 1 << 20)
causes = st.builds(
    FrozenCause,
    kind=st.sampled_from(FaultKind),
    iteration=uint63,
    text=lines,
    at_us=uint63,
    rank=st.none() | ranks,
    op_type=lines,
    op_name=lines,
    side=lines,
    slot=uint32,
    argument=lines,
    source=lines,
)
freezes = st.builds(
    JobFreeze, job_id=names, attempt=uint32, iteration=uint63, cause=causes, refusal=lines
)
reaches = st.builds(
    FreezeReach,
    agents=uint32,
    frozen_agents=uint32,
    unreached=st.lists(
        st.builds(UnreachedAgent, lines, st.lists(ranks, max_size=3).map(tuple), lines), max_size=2
    ).map(tuple),
)
JUMP = {"job_id": "j", "cause": {"kind": "jump"}}


@given(st.builds(RelayedFreeze, freezes, reaches, st.lists(causes, max_size=2).map(tuple)))
def test_freeze_round_trip(relayed):
    message = sent(relayed_freeze_to_wire(relayed), pb.RelayedFreeze)
    assert is_known_freeze(message.freeze)
    assert relayed_freeze_from_wire(message) == relayed


@given(
    st.builds(
        RankStep,
        job_id=names,
        rank=ranks,
        attempt=uint32,
        iteration=uint63,
        numbers=st.dictionaries(lines, st.floats(allow_nan=False), max_size=3),
    )
)
def test_step_round_trip(step):
    assert rank_step_from_wire(sent(rank_step_to_wire(step), pb.RankStep)) == step


@pytest.mark.parametrize(
    "fields",
    [
        {"freeze": {"job_id": "j", "cause": {"kind": "odd"}}},
        {"freeze": {"cause": {"kind": "jump"}}},
        {"freeze": JUMP, "unreached": [{}] * (MAX_UNREACHED_AGENTS + 1)},
        {"freeze": JUMP, "unreached": [{"ranks": [1] * (MAX_UNREACHED_RANKS + 1)}]},
        {"freeze": JUMP, "unreached": [{"ranks": [1 << 31]}]},
        {"freeze": JUMP, "unreached": [{"reason": "x" * 4097}]},
        {"freeze": JUMP, "later_causes": [{"kind": "jump"}] * (MAX_LATER_CAUSES + 1)},
        {"freeze": JUMP, "later_causes": [{"kind": "jump", "rank": 1 << 31}]},
    ],
)
def test_hostile_freeze_is_rejected(fields: dict[str, Any]):
    with pytest.raises(ProtocolError):
        relayed_freeze_from_wire(pb.RelayedFreeze(**fields))


def test_later_cause_of_a_later_version_is_left_out():
    fields: dict[str, Any] = {
        "freeze": JUMP,
        "later_causes": [{"kind": "odd"}, {"kind": "wait", "iteration": 7}],
    }
    [cause] = relayed_freeze_from_wire(pb.RelayedFreeze(**fields)).later_causes
    assert cause.subject == ("wait", 7, -1)


def test_texts_that_a_message_cannot_hold_are_replaced():
    """The cause is the same one wherever it has been."""
    cause = FrozenCause(FaultKind.REQUEST, 3, "a\ud800\0b" + "x" * 5000, 7)
    wire = sent(
        relayed_freeze_to_wire(RelayedFreeze(JobFreeze("j", 0, 3, cause))), pb.RelayedFreeze
    )
    read = relayed_freeze_from_wire(wire).freeze.cause
    assert read.text.startswith("a?\ufffdbx")
    assert read.identity == cause.identity
