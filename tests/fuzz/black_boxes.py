"""Targets for the black box: steps of ranks, their full tensors and faults, raw files of freezes,
and their records.
"""

from __future__ import annotations

from pathlib import Path

from fuzz.input_pieces import chosen, file_of, pieces
from google.protobuf.message import DecodeError
from support.black_box_rings import make_frozen_rings

from rankdump._analysis.black_box.fault_report import make_fault_report
from rankdump._core.freeze_record import format_freeze_record, parse_freeze_record
from rankdump._wire.black_box_messages import fault_notice_from_wire
from rankdump._wire.session_messages import kind_from_wire
from rankdump.errors import CorruptedError
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.blackbox.freeze_state import make_fault_cause
from rankdumpd.agent.blackbox.frozen_tree import place_tensors
from rankdumpd.agent.blackbox.pulse_rows import (
    iter_table_rows,
    list_timestamps,
    read_details,
    summarize_step,
)
from rankdumpd.agent.blackbox.raw_freeze import read_raw_record, read_raw_ring
from rankdumpd.agent.blackbox.step_ring import StepRings
from rankdumpd.agent.session.rank_session import RankSession
from rankdumpd.agent.session.registry import read_checked_plan


def steps(data: bytes) -> None:
    """Steps, tensors and faults of one session: what a ring keeps can be summarized and written."""
    request = make_frozen_rings(Path("/trees/a"))[1][0].request
    session = RankSession(request, read_checked_plan(request))
    rings = StepRings(lambda: 1 << 20, lambda: 0.0)
    try:
        for piece in pieces(data):
            which, rest = chosen(piece, 3)
            if which == 2:
                rings.take_tensors(session, agent_pb2.StepTensors.FromString(rest))
            elif which:
                notice = fault_notice_from_wire(agent_pb2.FaultNotice.FromString(rest))
                make_fault_cause(0, notice, 0)
            else:
                rings.take_step(session, agent_pb2.StepState.FromString(rest))
    except DecodeError:
        return
    assert rings.used_bytes <= 1 << 20
    for ring in rings.list_rings():
        kinds = [kind_from_wire(kind) for kind in ring.kinds]
        for state in ring.steps:
            tensors = ring.tensors.list_step(state.iteration)
            placed = place_tensors(state, kinds, tensors)
            stamps = list_timestamps(state, 0, len(placed.others))
            measured = stamps[: len(stamps) - len(placed.others)]
            rows = list(iter_table_rows(state, read_details(state), kinds, measured))
            summary = summarize_step(state, kinds, stamps, len(tensors))
            assert len(rows) == len(measured) == summary.tensors
            assert len(placed.measured) + len(placed.others) == summary.full_tensors


def raw_freezes(data: bytes) -> None:
    """A raw file of a freeze, to its end."""
    with file_of(data, "raw.freeze").open("rb") as file:
        record = read_raw_record(file)
        for rank in record.ranks[:64]:
            for _ in read_raw_ring(file, rank.held_steps).steps:
                pass


def freezes(data: bytes) -> None:
    """A record of a freeze: what is read can be written and reported."""
    record = parse_freeze_record(data)
    try:
        again = parse_freeze_record(format_freeze_record(record))
    except CorruptedError as error:
        raise AssertionError("a record that was read cannot be read again") from error
    assert again == record
    make_fault_report("/trees/a", [record])
