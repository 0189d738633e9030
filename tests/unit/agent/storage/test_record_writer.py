"""Tests of RecordWriter: complete files inside the root with the modes of the plan, and links."""

from __future__ import annotations

import errno
import logging
import os
import resource
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from rankdump._codec.file_codec import get_codec
from rankdump._codec.zstd_frames import is_stored_frame
from rankdump._core.plan import DumpPlan, OutputSettings
from rankdump._core.record import TensorSide
from rankdump._layout.profile import PROFILES
from rankdump._layout.tree_layouts import LAYOUTS
from rankdump._layout.tree_paths import TreeContext
from rankdumpd.agent.records import (
    FrameId,
    OriginalFile,
    ReceivedRecord,
    RecordOutcome,
    RecordStatus,
)
from rankdumpd.agent.storage.record_writer import PressureCheck, RecordWriter, find_no_pressure
from rankdumpd.agent.storage.statistic_tables import make_table_format
from rankdumpd.agent.storage.tree import DumpTree, MappingFiles, write_parts

LONG = "Default/" + "x" * 300 + "-op0"


def tree(root: Path, **fields) -> DumpTree:
    return DumpTree(str(root), file_mode=0o440, folder_mode=0o750, **fields)


def writer_of(
    tree: DumpTree,
    *,
    profile: str = "ms2.3",
    layout: str = "mindspore-sync",
    device_target: str = "CPU",
    codec: str = "none",
) -> RecordWriter:
    stand = TreeContext(str(tree.root), 5, "20250102030405", PROFILES[profile])
    lines = make_table_format(
        DumpPlan(output=OutputSettings(stand.root)), LAYOUTS[layout], stand, 0
    )
    return RecordWriter(
        tree,
        MappingFiles(tree),
        codec=get_codec(codec),
        layout=LAYOUTS[layout],
        context=stand,
        table_format=lines,
        device_target=device_target,
    )


def examined(
    head, sequence: int = 1, statistics: tuple[str, ...] | None = None, data: bytes = b""
) -> ReceivedRecord:
    elements = memoryview(data)
    return ReceivedRecord(FrameId("session", sequence), head, elements, b"", "digest", statistics)


def write_record(
    writer: RecordWriter,
    head,
    sequence: int = 1,
    data: bytes = b"123456",
    statistics: tuple[str, ...] | None = None,
) -> RecordOutcome:
    return write(writer, examined(head, sequence, statistics, data))


def write(
    writer: RecordWriter, record: ReceivedRecord, pressure: PressureCheck = find_no_pressure
) -> RecordOutcome:
    (outcome,) = writer.write([record], pressure=pressure)
    return outcome


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


LARGE = {"shape": (1 << 16,), "byte_count": 1 << 18}
DATA = bytes(1 << 17) + bytes(range(256)) * (1 << 9)


@pytest.fixture
def descriptors() -> Iterator[Callable[[], None]]:
    """Leave no free descriptor, until the end of the test."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def exhaust() -> None:
        lowest = os.open("/dev/null", os.O_RDONLY)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))

    yield exhaust
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("fields", [{}, LARGE])
def test_folders_that_are_kept_open_give_way_to_files(make_head, tmp_path, descriptors, fields):
    """No tensor is dropped for descriptors that are only held to open files faster."""
    writer = writer_of(tree(tmp_path))
    for iteration in range(5):
        assert write_record(writer, make_head(iteration=iteration)).path
    descriptors()
    head = make_head(iteration=5, **fields)
    outcome = write_record(writer, head, data=DATA if fields else b"123456")
    assert (outcome.status, outcome.reason) == (RecordStatus.STORED, "")
    assert (tmp_path / outcome.path).is_file()


@pytest.mark.parametrize("cause", ["", "ring_half_full"])
@pytest.mark.parametrize("again", ["", "queue_half_full"])
def test_resent_record_is_known_in_both_states(make_head, tmp_path, cause: str, again: str):
    """A file that a killed process wrote is that of the record, packed or not, then and now."""
    writer = writer_of(tree(tmp_path), codec="zstd")
    first = write(writer, examined(make_head(**LARGE), data=DATA), pressure=lambda _: cause)
    (path,) = files(tmp_path)
    before = path.read_bytes()
    assert (first.unpacked, first.bytes_stored) == (cause, len(before))
    assert is_stored_frame(before) == bool(cause)
    resent = write(writer, examined(make_head(**LARGE), data=DATA), pressure=lambda _: again)
    assert (resent.status, resent.bytes_stored) == (RecordStatus.STORED, len(before))
    assert resent.unpacked == ("resent" if cause else "")
    assert files(tmp_path) == [path]
    assert path.read_bytes() == before
    other = write(writer, examined(make_head(**LARGE), data=DATA[::-1]), pressure=lambda _: again)
    assert (other.status, other.reason) == (RecordStatus.DROPPED, "name_taken")


def test_write_asks_for_pressure_only_where_a_file_may_wait(make_head, tmp_path):
    """Small files and those of other codecs are as they stay."""

    def fail(_record: ReceivedRecord) -> str:
        raise AssertionError("this file is never packed later")

    for number, codec in enumerate(("none", "zstd-always", "zstd")):
        fields = LARGE if number < 2 else {}
        head = make_head(iteration=number, **fields)
        writer = writer_of(tree(tmp_path), codec=codec)
        data = DATA if number < 2 else bytes(16)
        assert not write(writer, examined(head, data=data), pressure=fail).unpacked


def test_link_to_an_unpacked_file_is_unpacked(make_head, tmp_path):
    """It has to become a link to the packed file."""
    writer = writer_of(tree(tmp_path), codec="zstd")
    first = write(writer, examined(make_head(**LARGE), data=DATA), pressure=lambda _: "rank_waits")
    assert first.original is not None
    other = make_head(op_name="Default/MatMul-op1", **LARGE)
    linked = writer.link(examined(other, 2, data=DATA), first.original)
    assert linked is not None
    assert (linked.status, linked.unpacked) == (RecordStatus.LINKED, "rank_waits")


def test_write_stores_record_with_modes_of_plan(make_head, tmp_path):
    """The record has the path of the layout and the mode of the plan, and no other file is left."""
    outcome = write_record(writer_of(tree(tmp_path / "a" / "b")), make_head())
    (path,) = files(tmp_path)
    assert path == tmp_path / "a" / "b" / outcome.path
    assert (outcome.status, outcome.bytes_stored) == (RecordStatus.STORED, path.stat().st_size)
    assert path.read_bytes().endswith(b"\n123456")
    assert stat.S_IMODE(path.stat().st_mode) == 0o440
    assert {stat.S_IMODE(p.stat().st_mode) for p in tmp_path.rglob("*") if p.is_dir()} == {0o750}


@pytest.mark.parametrize(
    "name",
    ["../../../etc/passwd", "/etc/passwd", "..", "a\0b", "a\nb", "a\\b", "", "\u202e\u00e9", ".x"],
)
def test_write_keeps_hostile_names_in_their_folder(make_head, tmp_path, name):
    """Any operator name leads to a file in the iteration's folder."""
    root = tmp_path / "root"
    outcome = write_record(writer_of(tree(root)), make_head(op_name=name, op_type=name))
    assert outcome.status is RecordStatus.STORED
    assert [path.parent for path in files(tmp_path)] == [root / "rank_0" / "Net" / "0" / "0"]


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, "disk_full"),
        (errno.EDQUOT, "disk_full"),
        (errno.EIO, "write_error"),
        (errno.EROFS, "write_error"),
        (errno.EMFILE, "no_descriptors"),
        (errno.ENFILE, "no_descriptors"),
    ],
)
def test_write_on_failing_disk_drops_record_and_leaves_no_file(
    make_head, tmp_path, caplog, number, reason
):
    """A write that fails half-way is dropped by reason, logged once, and leaves no file."""

    def fail(descriptor: int, parts) -> None:
        write_parts(descriptor, parts[:1])
        raise OSError(number, "failing on purpose")

    writer = writer_of(tree(tmp_path, write=fail))
    outcomes = [write_record(writer, make_head(), number) for number in (1, 2)]
    assert [(o.status, o.reason, o.path) for o in outcomes] == [
        (RecordStatus.DROPPED, reason, "")
    ] * 2
    assert files(tmp_path) == []
    assert len(caplog.records) == 1


def test_write_does_not_follow_link_out_of_root(make_head, tmp_path):
    """A folder that leads out of the tree gets nothing, at any depth."""
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.mkdir()
    for depth in ("rank_0", "rank_1/Net", "rank_2/Net/0/0"):
        link = root / depth
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(outside)
    writer = writer_of(tree(root))
    reasons = {write_record(writer, make_head(rank=rank)).reason for rank in (0, 1, 2)}
    assert reasons == {"outside_root"}
    assert list(outside.iterdir()) == []


def test_write_drops_record_where_a_link_has_its_name(make_head, tmp_path):
    """The link is not followed, and the tensor is counted as dropped."""
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    writer = writer_of(tree(tmp_path / "root"))
    path = tmp_path / "root" / write_record(writer, make_head()).path
    path.unlink()
    path.symlink_to(victim)
    assert write_record(writer, make_head()).reason == "name_taken"
    assert victim.read_text() == "untouched"


def test_write_blames_the_disk_where_it_cannot_read_an_existing_file(
    make_head, tmp_path, monkeypatch
):
    """Whether the file is that of the record, which was resent then, nobody can say."""
    writer = writer_of(tree(tmp_path))
    write_record(writer, make_head())

    def fail(*_args: object) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(DumpTree, "read_start", fail)
    assert write_record(writer, make_head()).reason == "write_error"


def test_write_replaces_hidden_file_of_crash(make_head, tmp_path):
    """Half a file of an earlier life does not keep the record from being written again."""
    writer = writer_of(tree(tmp_path))
    path = tmp_path / write_record(writer, make_head()).path
    path.with_name(".session-1.tmp").write_bytes(b"half")
    assert write_record(writer, make_head()).status is RecordStatus.STORED
    assert files(tmp_path) == [path]


def test_write_maps_long_name_once(make_head, tmp_path):
    """A long name has one line in mapping.csv, however often and by whomever it is written."""
    sent = [make_head(op_name=LONG), make_head(op_name=LONG, side=TensorSide.INPUT)]
    paths: set[str] = set()
    for _ in range(2):
        writer = writer_of(tree(tmp_path))
        paths |= {write_record(writer, head).path for head in (*sent, *sent)}
    mapping = tmp_path / "rank_0" / "Net" / "0" / "0" / "mapping.csv"
    lines = [line.split(",", 1) for line in mapping.read_text().splitlines()]
    assert {f"rank_0/Net/0/0/{name}" for name, _ in lines} == paths
    assert sorted(original.split(".")[5] for _, original in lines) == ["input", "output"]
    assert stat.S_IMODE(mapping.stat().st_mode) == 0o440


def test_write_completes_mapping_after_failed_append(make_head, tmp_path):
    """Half a line, of a full disk or of a crash, never becomes part of the next name's."""
    failing = [True]

    def write(descriptor: int, parts) -> None:
        if failing:
            write_parts(descriptor, [bytes(parts[0])[:30]])
            raise OSError(errno.ENOSPC, "failing on purpose")
        write_parts(descriptor, parts)

    mapping = tmp_path / "rank_0" / "Net" / "0" / "0" / "mapping.csv"
    head = make_head(op_name=LONG)
    assert write_record(writer_of(tree(tmp_path, write=write)), head).status is RecordStatus.DROPPED
    assert mapping.read_bytes() == b""
    failing.clear()
    mapping.chmod(0o600)
    mapping.write_bytes(b"7.npy,whole\n" + b"8.npy,torn" * 1000)
    outcome = write_record(writer_of(tree(tmp_path, write=write)), head)
    first, second = mapping.read_text().splitlines()
    assert first == "7.npy,whole"
    assert second.split(",")[0] == Path(outcome.path).name


def test_write_to_synced_tree_stores_same_files(make_head, tmp_path):
    outcome = write_record(writer_of(tree(tmp_path, synced=True)), make_head())
    assert (tmp_path / outcome.path).read_bytes().endswith(b"\n123456")


@pytest.mark.parametrize(
    ("profile", "device_target", "dtype", "name", "token"),
    [
        ("ms2.3", "CPU", "float32", "Default_a_MatMul-op0", ""),
        ("ms2.4", "CPU", "float32", "Default_a_MatMul-op0", ".Float32"),
        ("ms2.4", "GPU", "float32", "Default_a_MatMul-op0", ".float32"),
        ("ms2.4", "CPU", "bfloat16", "Default_a_MatMul-op0", ".BFloat16"),
        ("ms2.0", "CPU", "float32", "MatMul-op0", ""),
    ],
)
def test_write_names_file_and_row_by_profile(
    make_head, tmp_path, profile, device_target, dtype, name, token
):
    """File name and row depend on the profile, the folder does not."""
    writer = writer_of(tree(tmp_path), profile=profile, device_target=device_target)
    head = make_head(op_name="Default/a/MatMul-op0", dtype=dtype)
    outcome = write_record(writer, head, statistics=("6", "1"))
    file = f"MatMul.{name}.0.0.1.output.0.DefaultFormat{token}.npy"
    assert outcome.path == f"rank_0/Net/0/0/{file}"
    assert outcome.row is not None
    assert outcome.row.table.path == "rank_0/Net/0/0/statistic.csv"
    assert outcome.row.text.split(",")[:2] == ["MatMul", name]
    assert outcome.row.text.endswith("6,1" if profile == "ms2.0" else "6,1,")


def test_write_stores_constants_beside_iterations(make_head, tmp_path):
    """Constants of all iterations share one folder for each graph."""
    outcome = write_record(writer_of(tree(tmp_path)), make_head(constant=True, iteration=7))
    assert Path(outcome.path).parent == Path("rank_0/Net/0/constants")


def test_dropped_record_has_no_row(make_head, tmp_path, caplog):

    def fail(descriptor: int, parts) -> None:
        raise OSError(errno.ENOSPC, "failing on purpose")

    writer = writer_of(tree(tmp_path, write=fail))
    outcome = write_record(writer, make_head(), statistics=("6",))
    assert (outcome.status, outcome.row) == (RecordStatus.DROPPED, None)
    assert len(caplog.records) == 1


class TestLink:
    """A second name for a file that is whole and as it was written, or None and nothing else."""

    def original(self, writer: RecordWriter, make_head) -> OriginalFile:
        original = write_record(writer, make_head()).original
        assert original
        return original

    def test_is_same_file_as_original(self, make_head, tmp_path):
        """It has the path of the layout, occupies no space, and leaves no other file."""
        writer = writer_of(tree(tmp_path))
        original = self.original(writer, make_head)
        record = examined(make_head(rank=3, side=TensorSide.INPUT, iteration=7), 2, ("6",))
        outcome = writer.link(record, original)
        assert outcome
        assert (outcome.status, outcome.bytes_stored, outcome.digest) == (
            RecordStatus.LINKED,
            0,
            "digest",
        )
        assert outcome.path.startswith("rank_3/Net/0/7/")
        assert outcome.row
        assert outcome.row.table.path == "rank_3/Net/0/7/statistic.csv"
        assert (tmp_path / outcome.path).samefile(tmp_path / original.path)
        assert len(files(tmp_path)) == 2
        (tmp_path / original.path).unlink()
        assert (tmp_path / outcome.path).read_bytes().endswith(b"\n123456")

    def test_maps_long_name(self, make_head, tmp_path):
        """The full name of a link is in mapping.csv like any other."""
        writer = writer_of(tree(tmp_path))
        outcome = writer.link(
            examined(make_head(op_name=LONG), 2), self.original(writer, make_head)
        )
        assert outcome
        mapping = tmp_path / "rank_0" / "Net" / "0" / "0" / "mapping.csv"
        assert mapping.read_text().startswith(Path(outcome.path).name + ",")

    def test_accepts_resent_record(self, make_head, tmp_path):
        """It is linked already: no hidden name stays."""
        writer = writer_of(tree(tmp_path))
        original = self.original(writer, make_head)
        for _ in range(2):
            assert writer.link(examined(make_head(slot=1), 2), original)
        assert len(files(tmp_path)) == 2
        assert writer.link(examined(make_head(), 1), original) is None

    def test_replaces_hidden_link_of_crash(self, make_head, tmp_path):
        """The hidden name of a link is taken away, and the file behind it is not written to."""
        writer = writer_of(tree(tmp_path))
        original = self.original(writer, make_head)
        source = tmp_path / original.path
        source.with_name(".session-2.tmp").hardlink_to(source)
        assert write_record(writer, make_head(slot=1), 2, b"other").status is RecordStatus.STORED
        source.with_name(".session-3.tmp").hardlink_to(source)
        assert writer.link(examined(make_head(slot=2), 3), original)
        assert source.read_bytes().endswith(b"\n123456")
        assert len(files(tmp_path)) == 3

    @pytest.mark.parametrize("harm", ["gone", "changed", "replaced", "mode", "symlink"])
    def test_rejects_changed_original(self, make_head, tmp_path, harm):
        """A file that is gone or not the one that was written is never linked to."""
        writer = writer_of(tree(tmp_path))
        original = self.original(writer, make_head)
        path = tmp_path / original.path
        if harm == "changed":
            path.chmod(0o600)
            path.write_bytes(path.read_bytes()[::-1])
            path.chmod(0o440)
        elif harm == "mode":
            path.chmod(0o444)
        else:
            path.rename(tmp_path / "elsewhere")
            if harm == "replaced":
                path.write_bytes((tmp_path / "elsewhere").read_bytes()[::-1])
                path.chmod(0o440)
            elif harm == "symlink":
                path.symlink_to(tmp_path / "elsewhere")
        before = files(tmp_path)
        assert writer.link(examined(make_head(iteration=1), 2), original) is None
        assert files(tmp_path) == before

    @pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP])
    def test_returns_none_where_links_are_unsupported(
        self, make_head, tmp_path, monkeypatch, caplog, number
    ):
        """The failure is logged once, and copies are written."""

        def refuse(*_: object, **__: object) -> None:
            raise OSError(number, "refusing on purpose")

        caplog.set_level(logging.INFO)
        writer = writer_of(tree(tmp_path))
        original = self.original(writer, make_head)
        monkeypatch.setattr("os.link", refuse)
        for sequence in (2, 3):
            assert writer.link(examined(make_head(slot=1), sequence), original) is None
        assert write_record(writer, make_head(slot=1), 4).status is RecordStatus.STORED
        assert [record.levelname for record in caplog.records] == ["INFO"]

    def test_rejects_target_folder_out_of_root(self, make_head, tmp_path):
        """No link is made outside the tree."""
        outside = tmp_path / "outside"
        outside.mkdir()
        writer = writer_of(tree(tmp_path / "root"))
        original = self.original(writer, make_head)
        (tmp_path / "root" / "rank_1").symlink_to(outside)
        assert writer.link(examined(make_head(rank=1), 2), original) is None
        assert list(outside.iterdir()) == []

    def test_works_in_synced_tree(self, make_head, tmp_path):
        """Syncing changes when a link counts as safe, not that it is made."""
        writer = writer_of(tree(tmp_path, synced=True))
        original = self.original(writer, make_head)
        assert writer.link(examined(make_head(iteration=9), 2), original)

    def test_tree_kind_has_root_mode_and_durability(self, tmp_path):
        """Another root, mode or durability makes another kind; another spelling does not."""
        (tmp_path / "b").symlink_to(tmp_path / "a")
        kinds = [
            tree(tmp_path / "a").kind,
            tree(tmp_path / "c").kind,
            tree(tmp_path / "a", synced=True).kind,
            DumpTree(str(tmp_path / "a"), file_mode=0o400, folder_mode=0o750).kind,
        ]
        assert len(set(kinds)) == 4
        assert tree(tmp_path / "b").kind == kinds[0]
