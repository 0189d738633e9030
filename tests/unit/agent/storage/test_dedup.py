"""Tests of DuplicateIndex: linked and written records, waiting threads, removal of old files."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rankdumpd.agent.records import (
    FileStamp,
    FrameId,
    OriginalFile,
    ReceivedRecord,
    RecordOutcome,
    RecordStatus,
    make_drop_outcome,
)
from rankdumpd.agent.storage.record_writer import (
    MIN_LINKED_BYTES,
    DuplicateIndex,
    is_linkable,
)

WAIT_S = 300
KIND = "zstd /dump"


class FakeTree:
    """Calls the index, and collects the digests of written records."""

    def __init__(
        self, originals: DuplicateIndex, *, links: bool = True, full: bool = False
    ) -> None:
        self.originals, self.links, self.full = originals, links, full
        self.written: list[str] = []

    def __call__(self, record: ReceivedRecord, kind: str = KIND) -> RecordStatus:
        return self.originals.link_or_write(
            record,
            kind,
            link=lambda original: self._link(record, original),
            write=lambda: self._write(record),
        ).status

    def _link(self, record: ReceivedRecord, original: OriginalFile) -> RecordOutcome | None:
        assert original.path == record.digest
        return (
            RecordOutcome(record.frame_id, record.head, RecordStatus.LINKED) if self.links else None
        )

    def _write(self, record: ReceivedRecord) -> RecordOutcome:
        self.written.append(record.digest)
        if self.full:
            return make_drop_outcome(record.frame_id, record.head, "disk_full")
        original = OriginalFile(record.digest, FileStamp(1, 2, 3))
        return RecordOutcome(record.frame_id, record.head, RecordStatus.STORED, original=original)


@pytest.fixture
def record(make_head):
    """Makes records of a page of float32."""

    def make(digest: str, **head) -> ReceivedRecord:
        fields = {"shape": (MIN_LINKED_BYTES // 4,), "byte_count": MIN_LINKED_BYTES}
        made = make_head(**(fields | head))
        return ReceivedRecord(FrameId("s", 1), made, memoryview(b""), digest=digest)

    return make


@pytest.mark.parametrize(
    ("second", "fate"),
    [
        ({}, RecordStatus.LINKED),
        ({"op_name": "Default/other", "rank": 7, "iteration": 3}, RecordStatus.LINKED),
        ({"dtype": "int32"}, RecordStatus.STORED),
        ({"shape": (MIN_LINKED_BYTES // 8, 2)}, RecordStatus.STORED),
    ],
    ids=["again", "elsewhere", "dtype", "shape"],
)
def test_record_with_same_bytes_type_and_shape_is_linked(record, second, fate):
    """Any operator, rank and iteration; another type or shape makes another file."""
    disk = FakeTree(DuplicateIndex())
    assert disk(record("a")) is RecordStatus.STORED
    assert disk(record("a", **second)) is fate


def test_records_of_other_kind_are_not_linked(record):
    """A file of one kind is never linked from another."""
    disk = FakeTree(DuplicateIndex())
    assert [disk(record("a"), kind) for kind in ("zstd /a", "zstd /b", "none /a")] == [
        RecordStatus.STORED
    ] * 3


def test_small_records_are_not_linkable(record):
    """Below a page a link saves nothing."""
    assert is_linkable(record("a").head.kind)
    tiny = record("a", byte_count=MIN_LINKED_BYTES - 4, shape=(MIN_LINKED_BYTES // 4 - 1,))
    assert not is_linkable(tiny.head.kind)


def test_record_is_written_where_link_fails(record):
    """The copy replaces the original that cannot be linked."""
    disk = FakeTree(DuplicateIndex(), links=False)
    assert [disk(record("a")) for _ in range(2)] == [RecordStatus.STORED] * 2
    disk.links = True
    assert disk(record("a")) is RecordStatus.LINKED


def test_dropped_record_is_not_remembered(record):
    """The next record is written again."""
    disk = FakeTree(DuplicateIndex(), full=True)
    assert disk(record("a")) is RecordStatus.DROPPED
    disk.full = False
    assert disk(record("a")) is RecordStatus.STORED


def test_index_forgets_least_recently_used_file(record):
    """The index is bounded and keeps files that were linked lately."""
    originals = DuplicateIndex(max_files=2)
    disk = FakeTree(originals)
    for digest in "abac":
        disk(record(digest))
    assert len(originals) == 2
    assert [disk(record(digest)) for digest in "ab"] == [RecordStatus.LINKED, RecordStatus.STORED]


def test_second_record_waits_for_write_of_first(record):
    """Two workers with the same tensor at the same moment write one file."""
    begun, go_on = threading.Event(), threading.Event()

    class Slow(FakeTree):
        def _write(self, record: ReceivedRecord) -> RecordOutcome:
            begun.set()
            assert go_on.wait(WAIT_S)
            return super()._write(record)

    disk = Slow(DuplicateIndex())
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(disk, record("a"))
        assert begun.wait(WAIT_S)
        second = pool.submit(disk, record("a"))
        assert not second.done()
        go_on.set()
        assert (first.result(WAIT_S), second.result(WAIT_S)) == (
            RecordStatus.STORED,
            RecordStatus.LINKED,
        )


def test_failing_write_releases_waiting_record(record):
    """An error ends the turn."""
    originals = DuplicateIndex()

    def fail() -> RecordOutcome:
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        originals.link_or_write(record("a"), KIND, link=lambda _: None, write=fail)
    assert FakeTree(originals)(record("a")) is RecordStatus.STORED


def test_threads_write_each_tensor_once(record):
    """However many workers: one file for each tensor."""
    disk = FakeTree(DuplicateIndex())
    with ThreadPoolExecutor(8) as pool:
        fates = list(pool.map(disk, [record(str(n % 50)) for n in range(2000)]))
    assert sorted(disk.written) == sorted(str(n) for n in range(50))
    assert fates.count(RecordStatus.LINKED) == 1950
