"""Tensors in full of a frozen step, as files of its tree and records of its manifest."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import NamedTuple, cast

from rankdump._core.black_box import StepState, StepTensor
from rankdump._core.manifest import ManifestRecord
from rankdump._core.plan import UNNAMED_MODEL
from rankdump._core.record import TensorKind
from rankdump._core.session_protocol import RecordHead
from rankdumpd.agent.blackbox.pulse_rows import read_pulses
from rankdumpd.agent.records import FrameId, ReceivedRecord, RecordOutcome, RecordStatus
from rankdumpd.agent.session.rank_session import RankSession
from rankdumpd.agent.storage.record_formats import examine_record


class PlacedTensors(NamedTuple):
    """The tensors in full of a step."""

    measured: dict[int, StepTensor]
    """Those that have a row in the step, by its number."""
    others: list[StepTensor]

    def __len__(self) -> int:
        return len(self.measured) + len(self.others)


def place_tensors(
    state: StepState, kinds: Sequence[TensorKind], tensors: Sequence[StepTensor]
) -> PlacedTensors:
    """Return the tensors by their rows; one whose row is that of another kind has none."""
    numbers = cast("list[int]", read_pulses(state)["kind"].tolist())
    placed = PlacedTensors({}, [])
    for tensor in tensors:
        row = tensor.row
        has_row = row is not None and row < len(numbers) and kinds[numbers[row]] == tensor.kind
        if row is not None and has_row and row not in placed.measured:
            placed.measured[row] = tensor
        else:
            placed.others.append(tensor)
    return placed


def write_tensors(
    session: RankSession, tensors: Sequence[StepTensor], timestamps_us: Sequence[int]
) -> list[ManifestRecord]:
    """Write the files of the tensors of a step, unless they exist; return their records.

    OSError when one cannot be written.
    """
    storage = session.storage
    received = [
        examine_record(_make_received(session, tensor, at_us), None)
        for tensor, at_us in zip(tensors, timestamps_us, strict=True)
    ]
    # In no order.
    outcomes = {each.head.timestamp_us: each for each in storage.writer.write(received)}
    for outcome in outcomes.values():
        if outcome.status is RecordStatus.DROPPED:
            text = f"a tensor of the black box cannot be written ({outcome.reason})"
            raise OSError(errno.EIO, text, str(storage.tree.root))
    return [
        _make_record(tensor.kind, outcomes[at_us])
        for tensor, at_us in zip(tensors, timestamps_us, strict=True)
    ]


def _make_received(session: RankSession, tensor: StepTensor, timestamp_us: int) -> ReceivedRecord:
    request, kind = session.request, tensor.kind
    model = session.plan.output.net_name or kind.model or UNNAMED_MODEL
    named = kind._replace(model=model)
    head = RecordHead(named, tensor.iteration, timestamp_us, request.rank)
    # Times differ between all tensors of a rank, as numbers of frames do.
    frame_id = FrameId(request.session_id, timestamp_us)
    return ReceivedRecord(frame_id, head, memoryview(tensor.data))


def _make_record(kind: TensorKind, outcome: RecordOutcome) -> ManifestRecord:
    return ManifestRecord(
        outcome.path,
        outcome.head.timestamp_us,
        kind.op_type,
        kind.op_name,
        kind.argument,
        kind.dtype,
        kind.shape,
        kind.byte_count,
        outcome.bytes_stored,
        outcome.digest,
        "",
        kind.microbatch,
        kind.phase,
        kind.layout,
    )
