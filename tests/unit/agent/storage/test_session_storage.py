"""Tests of store_records: records of one batch have outcomes of their own."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import xxhash

from rankdump._core.plan import ContentSettings, DumpPlan, OutputSettings
from rankdump._core.session_protocol import RecordHead
from rankdump._core.tensor_layout import LayoutSource, TensorLayout, make_rank_mesh
from rankdump.errors import CorruptedError
from rankdumpd.agent.records import (
    BaselineVerdict,
    FrameId,
    ReceivedRecord,
    RecordOutcome,
    RecordStatus,
)
from rankdumpd.agent.storage.baseline import BaselineIndex
from rankdumpd.agent.storage.record_formats import examine_record
from rankdumpd.agent.storage.record_writer import DuplicateIndex, find_no_pressure
from rankdumpd.agent.storage.session_storage import make_session_storage, store_records

SMALL = {"shape": (2,), "byte_count": 8}
PAGE = {"shape": (1024,), "byte_count": 4096}


@pytest.fixture
def store(make_request, tmp_path: Path):
    """Stores records of a tree; their numbers are their places in the batch."""
    plan = DumpPlan(output=OutputSettings(root=str(tmp_path)))
    storage = make_session_storage(make_request(), plan)
    store_some = partial(
        store_records,
        originals=DuplicateIndex(),
        baselines=BaselineIndex(),
        find_pressure=find_no_pressure,
    )

    def run(*batch: tuple[RecordHead, bytes]) -> list[RecordOutcome]:
        records = [
            ReceivedRecord(FrameId("s", number), head, memoryview(data))
            for number, (head, data) in enumerate(batch)
        ]
        found = store_some(records, storage)
        return sorted(found, key=lambda outcome: outcome.frame_id)

    return run


def test_records_of_a_batch_have_their_own_outcomes(store, make_head, tmp_path: Path):
    """Small files are written together, others alone; of two with one name the first is kept."""
    outcomes = store(
        (make_head(**SMALL), b"12345678"),
        (make_head(op_name="Default/a", **PAGE), bytes(4096)),
        (make_head(**SMALL), b"another!"),
        (make_head(op_name="Default/b", iteration=1, **SMALL), b"abcdefgh"),
        (make_head(op_name="Default/b", **PAGE), bytes(4096)),
    )
    assert [(each.status.value, each.reason) for each in outcomes] == [
        ("stored", ""),
        ("stored", ""),
        ("dropped", "name_taken"),
        ("stored", ""),
        ("linked", ""),
    ]
    kept = [each for each in outcomes if each.status is not RecordStatus.DROPPED]
    assert all((tmp_path / each.path).is_file() for each in kept)
    assert (tmp_path / outcomes[0].path).read_bytes().endswith(b"12345678")


def test_batch_that_is_stored_again_is_recognised(store, make_head):
    """A worker repeats a batch record by record where one of them fails."""
    batch = [(make_head(op_name=f"Default/{n}", **SMALL), bytes([n]) * 8) for n in range(3)]
    first, again = store(*batch), store(*batch)
    assert [each.path for each in again] == [each.path for each in first]
    assert {each.status for each in (*first, *again)} == {RecordStatus.STORED}


def test_sample_is_stored_whatever_the_baseline_has(make_request, make_head, tmp_path: Path):
    """First elements do not stand for their tensor, and no baseline is asked about them."""
    mesh = make_rank_mesh("world", ("dp",), (1,), range(1))
    layout = TensorLayout(LayoutSource.SAMPLE, (8,), (0,), mesh, (0,), (), flat_range=(0, 2))
    plan = DumpPlan(
        OutputSettings(str(tmp_path)), content=ContentSettings(baseline=str(tmp_path / "none"))
    )
    storage = make_session_storage(make_request(), plan)
    whole, other = make_head(**SMALL), make_head(op_name="Default/b", **SMALL)
    heads = (whole, other._replace(kind=other.kind._replace(layout=layout)))
    records = [
        ReceivedRecord(FrameId("s", number), head, memoryview(bytes(8)))
        for number, head in enumerate(heads)
    ]
    found = store_records(
        records,
        storage,
        originals=DuplicateIndex(),
        baselines=BaselineIndex(),
        find_pressure=find_no_pressure,
    )
    by_number = {each.frame_id.sequence: each for each in found}
    assert by_number[0].status is RecordStatus.STORED
    assert by_number[0].baseline is not None
    assert by_number[0].baseline.verdict is BaselineVerdict.UNAVAILABLE
    assert by_number[1].status is RecordStatus.DEGRADED
    assert by_number[1].baseline is None


@pytest.mark.parametrize("damaged", [False, True])
def test_record_whose_elements_differ_from_its_seal_is_corrupted(make_head, damaged: bool):
    data = b"12345678"
    seal = xxhash.xxh3_128_digest(data[::-1] if damaged else data)
    record = ReceivedRecord(FrameId("s", 1), make_head(**SMALL), memoryview(data), seal)
    if damaged:
        with pytest.raises(CorruptedError, match="frame 1 differs"):
            examine_record(record, None)
    else:
        assert examine_record(record, None).digest == seal.hex()
