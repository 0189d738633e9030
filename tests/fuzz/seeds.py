"""Generator of the first, valid files of the corpus: `PYTHONPATH=tests python -m fuzz.seeds`.

A fuzzer starts from these; what it found is kept beside them.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlencode

from fuzz import damaged_rows, samples
from fuzz.input_pieces import joined
from fuzz.pages import PATHS
from fuzz.seeds_of_files import FILES
from fuzz.streams import PLANS, RING_BYTES
from fuzz.targets import CORPUS
from support.black_box_rings import (
    make_fault_message,
    make_frozen_rings,
    make_step_message,
    make_tensors,
)
from support.web_trees import LINEAR
from xxhash import xxh3_128_digest

from rankdump._core.black_box import RankStep
from rankdump._core.events import CallOutcome, EventKind, ProcessGroup
from rankdump._core.freeze_record import format_freeze_record
from rankdump._core.job_control import ControlledRank, ControlResult
from rankdump._core.plan import plan_to_json
from rankdump._core.record import StatisticRows
from rankdump._core.recorder_protocol import CollectiveCall, StartedEvent
from rankdump._shm.event_journal import EventJournal
from rankdump._shm.slab_format import (
    ENTRY_MAGIC,
    JOURNAL_BYTES,
    JOURNAL_SLOTS,
    RING_OFFSET,
    EntryState,
    align_length,
    compute_slab_bytes,
    format_slab,
)
from rankdump._shm.slab_ring import SlabWriter
from rankdump._wire import status_messages
from rankdump._wire.black_box_messages import (
    job_freeze_to_wire,
    rank_step_to_wire,
    relayed_freeze_to_wire,
    step_tensor_to_wire,
)
from rankdump._wire.control_messages import (
    answer_to_wire,
    control_request_to_wire,
    order_to_wire,
    result_to_wire,
)
from rankdump._wire.frames import make_metadata_frame, make_record_frames, serialize_record_body
from rankdump._wire.metadata_messages import events_to_wire
from rankdump._wire.session_messages import (
    session_grant_to_wire,
    session_request_to_wire,
    timeouts_to_wire,
)
from rankdump.wire.v1 import agent_pb2, coordinator_pb2
from rankdumpd.agent.blackbox.raw_freeze import RawFreezeFolder


def main() -> None:
    """Write them."""
    made = {
        "requests": [*_requests()],
        "frames": [bytes([which]) + joined([*_frames()]) for which in range(len(PLANS))],
        "slabs": [b"\0" + _slab()],
        "old_slabs": [b"\0" + _old_slab()],
        "rings": [*_rings()],
        "journals": [bytes([which]) + _journal() for which in range(len(PLANS))],
        "sessions": [*_changes(damaged_rows.ledger_base()[1].columns)],
        "states": [*_changes(damaged_rows.state_base()[1].columns)],
        "ledger": [*_kept()],
        "reports": [joined([_report(1), _report(2)])],
        "answers": [*_answers()],
        "steps": [joined([*_steps()])],
        "raw_freezes": [*_raw_freezes()],
        "freezes": [format_freeze_record(make_frozen_rings(Path("/trees/a"))[0])],
        "plans": [plan_to_json(plan) for plan in PLANS],
        "pages": [*_pages()],
        **FILES,
    }
    for name, inputs in made.items():
        folder = CORPUS / name
        folder.mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(inputs):
            (folder / f"seed_{number}").write_bytes(data)


def _pages() -> Iterator[bytes]:
    """Yield an address of each page with parameters that it has."""
    place = f"{urlencode({'name': LINEAR})}&side=input&slot=0&rank=1&iteration=1"
    addresses = {
        "/": "job=job&attempt=0",
        "/tensors": "search=linear&rank=1&iteration=0&side=output&nonfinite=0&after=0-0-0-1&tree=1",
        "/tensor": f"{place}&statistic=max&rows=2&columns=0&at=0,1,0&joined=0&first_iteration=0",
        "/modules": "under=encoder%2F0&iteration=1&rank=0",
        "/ranks": "statistic=fingerprint_differences&base=1&tensors=all&search=op0&first_rank=0",
        "/ranks.json": "statistic=time&first_iteration=1",
        "/ranks/map.png": "statistic=fingerprint_differences&against=1",
        "/order": "iteration=1&around=7&collectives=1&attempt=0",
        "/order/trace.json": "iteration=1&trace=0&rank=1&first=3&last=9",
        "/diff": "a=0&b=1&rank_a=1&rank_b=0&verdicts=nan,different&row=2&opened=3&rtol=1e-3&atol=0",
        "/diff.json": "a=1&b=0&noise=0&unshard=1&tolerance=*norm*%3D1e-3&pick_a=x&pick_b=y&drop=0",
        "/diff/mapping.json": "pairs=%7B%22a%22%3A%22b%22%7D",
        "/blackbox": "freeze=0",
        "/query": "sql=SELECT+1",
        "/tensor/slice.png": place,
        "/tensor/elements.npy": place,
        "/overview.json": "token=abc&tree=1",
    }
    for path, query in addresses.items():
        yield bytes([PATHS.index(path)]) + query.encode()
    part = next(each for each in range(128, 256) if PATHS[each % len(PATHS)] == "/modules")
    yield bytes([part]) + b"under=encoder"


def _requests() -> Iterator[bytes]:
    for plan in PLANS:
        request = replace(samples.REQUEST, plan_json=plan_to_json(plan))
        yield session_request_to_wire(request).SerializeToString()


def _frames() -> Iterator[bytes]:
    data = samples.VALUES.tobytes()
    for frame in make_record_frames(1, samples.HEAD, memoryview(data)):
        yield frame.SerializeToString()
    cut = next(make_record_frames(2, samples.HEAD, memoryview(data[:8])))
    yield cut.SerializeToString()
    chunk = agent_pb2.Chunk(offset=8, data=data[8:])
    yield agent_pb2.Frame(sequence=2, chunk=chunk).SerializeToString()
    gone = agent_pb2.Lost(iteration=samples.HEAD.key.iteration, tensors=3, reason="corrupted")
    yield agent_pb2.Frame(sequence=3, lost=gone).SerializeToString()
    for sequence, declaration in enumerate(samples.DECLARATIONS, 4):
        yield make_metadata_frame(sequence, declaration).SerializeToString()


def _slab() -> bytes:
    memory = memoryview(bytearray(compute_slab_bytes(RING_BYTES)))
    format_slab(memory)
    writer = SlabWriter(memory)
    data = samples.VALUES.tobytes()
    for sequence in range(1, 5):
        frame = agent_pb2.Frame(sequence=sequence).SerializeToString() + serialize_record_body(
            samples.HEAD
        )
        room = writer.reserve(frame, len(data), sequence=sequence, mark=1)
        assert room is not None
        room.data[:] = data
        writer.commit(room, whole=sequence != 3)
        if sequence == 2:
            writer.seal(writer.written, lambda _, elements: xxh3_128_digest(elements))
    end = RING_OFFSET + writer.written
    written = writer.written.to_bytes(8, "little")
    return bytes(8) + written + bytes(memory[RING_OFFSET:end])


def _old_slab() -> bytes:
    ring, data = b"", samples.VALUES.tobytes()
    for sequence in range(1, 4):
        frame = agent_pb2.Frame(sequence=sequence).SerializeToString() + serialize_record_body(
            samples.HEAD
        )
        state = EntryState.ABANDONED if sequence == 2 else EntryState.COMMITTED
        head = struct.pack("<IIQQQ", ENTRY_MAGIC, state, len(ring), len(frame), len(data))
        for part in (head + frame, data):
            ring += part.ljust(align_length(len(part)), b"\0")
    return bytes(8) + len(ring).to_bytes(8, "little") + ring


def _rings() -> Iterator[bytes]:
    slab = _slab()
    written = slab[8:16]
    bells = ((), (written,), ((64).to_bytes(8, "little"), written, bytes(8)))
    for which, rung in enumerate(bells):
        yield bytes([which, len(rung)]) + b"".join(rung) + slab


def _journal() -> bytes:
    memory = memoryview(bytearray(JOURNAL_BYTES))
    journal = EventJournal(memory)
    group = ProcessGroup("world", (0, 1))
    calls = (
        None,
        CollectiveCall(EventKind.ALL_REDUCE, group, 3, 8, "float32"),
        CollectiveCall(EventKind.RECV, group, 0, peer=1),
    )
    for position, call in enumerate(calls, 1):
        begun = StartedEvent(position, 1000 + position, 0, f"Default/Op{position}", call, 0)
        journal.add_event(begun, 7)
        if position < len(calls):
            journal.end_event(begun, position, 2000, CallOutcome.COMPLETE)
    count, begin = len(calls), 64 + 64 * JOURNAL_SLOTS
    text_end = int.from_bytes(memory[8:16], "little")
    slots, texts = memory[128 : 128 + 64 * count], memory[begin : begin + text_end]
    return bytes(memory[:16]) + bytes([count]) + bytes(slots) + bytes(texts)


def _changes(columns: Sequence[tuple[str, str]]) -> Iterator[bytes]:
    """Yield a text, bytes and a number in the place of each column's value; some in one input."""
    texts = (b"{}", b"[]", b"null", b'{"rank": "x"}', b"\xff")
    for at in range(0, len(columns), 8):
        places = range(at, min(at + 8, len(columns)))
        yield joined([bytes([place, 0]) + texts[place % len(texts)] for place in places])
    for kind, value in ((1, b"\xff"), (2, b"\xff" * 8), (3, b"\7"), (4, b"")):
        for table in dict.fromkeys(table for table, _ in columns):
            last = max(at for at, (name, _) in enumerate(columns) if name == table)
            yield joined([bytes([last, kind]) + value])


def _steps() -> Iterator[bytes]:
    """Yield the steps of a session, its tensors in full and its fault."""
    for iteration in range(3):
        message = make_step_message(
            iteration, nans=iteration, stacks=("File a.py, line 3",), notes=("zero",)
        )
        yield b"\0" + message.SerializeToString(deterministic=True)
    tensors = agent_pb2.StepTensors(
        pieces=[piece for tensor in make_tensors(2) for piece in step_tensor_to_wire(tensor)]
    )
    yield b"\2" + tensors.SerializeToString(deterministic=True)
    yield b"\1" + make_fault_message(2).SerializeToString(deterministic=True)


def _raw_freezes() -> Iterator[bytes]:
    """Yield a raw file, whose folder is removed."""
    with tempfile.TemporaryDirectory() as folder:
        yield RawFreezeFolder(Path(folder)).write(*make_frozen_rings(Path("/trees/a"))).read_bytes()


def _kept() -> Iterator[bytes]:
    for declaration in samples.DECLARATIONS:
        which = not isinstance(declaration, StatisticRows)
        yield bytes([which]) + make_metadata_frame(7, declaration).SerializeToString()


def _report(sequence: int) -> bytes:
    return coordinator_pb2.ReportRequest(
        agent_id="agent",
        sequence=sequence,
        sessions=[status_messages.session_to_wire(samples.SESSION_STATUS)],
        iterations=[status_messages.iteration_to_wire(samples.BALANCE)],
        events=[
            coordinator_pb2.RankEvents(
                job_id="job",
                rank=0,
                session_id=samples.BALANCE.session_id,
                columns=events_to_wire(samples.EVENTS),
            )
        ],
        timeouts=[
            coordinator_pb2.RankTimeouts(
                job_id="job", rank=0, timeouts=timeouts_to_wire(samples.TIMEOUTS)
            )
        ],
        roots={"job": "/trees/a"},
        host="host",
        control_answers=[answer_to_wire(samples.ORDER_ANSWER)],
        freezes=[job_freeze_to_wire(samples.FREEZE)],
        steps=[
            rank_step_to_wire(RankStep("job", rank, 0, 2, {"loss": 1.0 + 99 * (rank == 4)}))
            for rank in range(5)
        ],
    ).SerializeToString()


def _answers() -> Iterator[bytes]:
    messages = (
        session_grant_to_wire(samples.GRANT),
        status_messages.view_to_wire(samples.VIEW),
        status_messages.entry_to_wire(samples.ENTRY),
        status_messages.finding_to_wire(samples.FINDING),
        status_messages.timeout_hint_to_wire(samples.HINT),
        status_messages.samples_to_wire(samples.SAMPLES),
        relayed_freeze_to_wire(samples.RELAYED),
        order_to_wire(samples.ORDER),
        answer_to_wire(samples.ORDER_ANSWER),
        control_request_to_wire(samples.ORDER),
        result_to_wire(ControlResult(9, (ControlledRank(0, 9), ControlledRank(1, None, "gone")))),
    )
    for which, message in enumerate(messages):
        yield bytes([which]) + message.SerializeToString()


if __name__ == "__main__":
    main()
