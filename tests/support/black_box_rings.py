"""Rings of black boxes for tests: kinds, steps, faults, and raw files of freezes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rankdump._core.black_box import (
    DETAIL_ROW,
    PULSE_ROW,
    FaultKind,
    StepCause,
    StepState,
    StepTensor,
)
from rankdump._core.freeze_record import (
    FreezeRecord,
    FrozenCause,
    FrozenRank,
    is_record_name,
    parse_freeze_record,
)
from rankdump._core.plan import BlackBoxSettings, DumpPlan, OutputSettings, plan_to_json
from rankdump._core.record import TensorKind, TensorSide
from rankdump._core.session_protocol import SessionRequest
from rankdump._core.status import SessionState
from rankdump._core.tensor_fingerprint import FINGERPRINT_BYTES
from rankdump._wire.black_box_messages import step_state_to_wire
from rankdump._wire.session_messages import kind_to_wire
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.blackbox.raw_freeze import FrozenRing

STARTED_US = 1_700_000_000_000_000
KINDS = tuple(
    TensorKind(0, op_type, name, TensorSide.OUTPUT, 0, "float32", (2, 2), 16)
    for op_type, name in (
        ("Linear", "Default/network-Net/a-Linear/Linear-op0"),
        ("Linear", "Default/network-Net/b-Linear/Linear-op0"),
        ("Parameter", "Gradients/Default/network-Net/a-Linear/weight"),
    )
)
WIRE_KINDS = tuple(map(kind_to_wire, KINDS))


def make_details(*rows: int) -> bytes:
    """Return the details of these rows: fingerprints of one byte again and again."""
    found = np.zeros(len(rows), DETAIL_ROW)
    found["row"] = rows
    found["total"], found["positives"], found["negatives"], found["zeros"] = 1.5, 1, 2, 1
    found["fingerprint"] = bytes([7] * FINGERPRINT_BYTES)
    return found.tobytes()


def make_step(iteration: int, nans: int = 0, **fields) -> StepState:
    """Return a step of three tensors; with `nans` the second one has some, and so has the loss.

    In even iterations the first tensor has details.
    """
    fields.setdefault("details", b"" if iteration % 2 else make_details(0))
    rows = np.zeros(len(KINDS), PULSE_ROW)
    rows["kind"] = range(len(KINDS))
    rows["maximum"], rows["minimum"], rows["squares"] = iteration + 1, -1, 4
    rows["nan"][1] = nans
    numbers = {"loss": float("nan") if nans else 0.5, "learning_rate.0": 0.01}
    return StepState(
        iteration,
        STARTED_US + iteration * 1_000_000,
        STARTED_US + iteration * 1_000_000 + 500_000,
        rows.tobytes(),
        StepCause(numbers, {"batch.0": f"{iteration:016x}"}),
        **fields,
    )


def make_step_message(iteration: int, nans: int = 0, **fields) -> agent_pb2.StepState:
    """Return the message of such a step, with all kinds."""
    return step_state_to_wire(make_step(iteration, nans, **fields), WIRE_KINDS, 0)


def make_fault_message(iteration: int, kind: str = "non_finite") -> agent_pb2.FaultNotice:
    """Return the message of a fault in the second tensor."""
    return agent_pb2.FaultNotice(
        iteration=iteration,
        kind=kind,
        text="NaN in an output",
        tensor_kind=WIRE_KINDS[1],
        source="train.py:7",
    )


def make_frozen_rings(
    root: Path, *, steps: int = 3, ranks: int = 2, nan_at: int = 1, full: bool = True
) -> tuple[FreezeRecord, list[FrozenRing]]:
    """Return the record and the rings of a job whose last rank has a NaN in one iteration, and
    there with `full` the tensor that has it and the input of its operator.
    """
    plan = DumpPlan(OutputSettings(str(root)), black_box=BlackBoxSettings(8))
    rings = [
        FrozenRing(
            SessionRequest(
                *("job", f"session-{rank}", rank, ranks, rank, "here", 40 + rank, "none 0", "CPU"),
                plan_json=plan_to_json(plan),
                config_source=b"{}",
            ),
            WIRE_KINDS,
            tuple(
                make_step(at, nans=5 * (rank == ranks - 1 and at == nan_at)) for at in range(steps)
            ),
            {nan_at: make_tensors(nan_at)} if full and rank == ranks - 1 else {},
        )
        for rank in range(ranks)
    ]
    cause = FrozenCause(
        FaultKind.NON_FINITE,
        nan_at,
        "NaN in an output",
        STARTED_US,
        ranks - 1,
        "Linear",
        KINDS[1].op_name,
        "output",
        source="train.py:7",
    )
    described = tuple(
        FrozenRank(
            *(rank, f"session-{rank}", 40 + rank, SessionState.OPEN),
            held_steps=steps,
            held_tensors=2 * (full and rank == ranks - 1),
            tensor_bytes=40 * (full and rank == ranks - 1),
        )
        for rank in range(ranks)
    )
    return FreezeRecord("job", 0, nan_at, "here", ranks, STARTED_US, (cause,), described), rings


def read_tree_record(tree: Path) -> FreezeRecord:
    """Return the only record of a frozen tree."""
    [path] = [path for path in (tree / ".rankdump").iterdir() if is_record_name(path.name)]
    return parse_freeze_record(path.read_bytes())


def make_tensors(iteration: int) -> tuple[StepTensor, ...]:
    """Return tensors of such a step in full: the second one, and an input of its operator that has
    no row and other elements in each iteration.
    """
    data = np.array([[1.5, np.nan], [-0.0, iteration]], np.float32).tobytes()
    ids = np.array([iteration, 7, -1], np.int64).tobytes()
    of_input = KINDS[1]._replace(
        side=TensorSide.INPUT, dtype="int64", shape=(3,), byte_count=24, argument="args.0"
    )
    return (
        StepTensor(iteration, KINDS[1], data, row=1, about_fault=True),
        StepTensor(iteration, of_input, ids, about_fault=True),
    )
