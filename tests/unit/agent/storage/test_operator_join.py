"""Tests of BinFileJoiner: joined files are complete or absent, and equal when repeated."""

from __future__ import annotations

import errno
import itertools
import os
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rankdump._binfile import bin_file
from rankdump._binfile.header_parts import OpInput, OpOutput
from rankdump._codec.file_codec import get_codec
from rankdump._core.cann_types import DATA_TYPES, FORMAT_NUMBERS
from rankdump._core.plan import DumpPlan, OutputSettings
from rankdump._core.record import TensorSide
from rankdump._layout.tree_layouts import LAYOUTS
from rankdump._layout.tree_paths import TreeContext
from rankdumpd.agent.records import BinTensor, FrameId, OperatorMember, ReceivedRecord, RecordStatus
from rankdumpd.agent.storage import tree as plain_files
from rankdumpd.agent.storage.record_formats import (
    BinFileJoiner,
    encode_bin,
    examine_record,
    make_bin_header,
)
from rankdumpd.agent.storage.record_writer import RecordWriter
from rankdumpd.agent.storage.statistic_tables import make_table_format
from rankdumpd.agent.storage.tree import DumpTree, MappingFiles, write_parts

CANN = LAYOUTS["cann"]
NOISE = np.random.default_rng(4).integers(0, 256, 1 << 17, dtype=np.uint8)
LONG = "Default/" + "x" * 300 + "-op0"
TENSORS = {
    (TensorSide.OUTPUT, 0): np.arange(6, dtype=np.float32).reshape(2, 3),
    (TensorSide.INPUT, 2): np.zeros((1, 2, 3, 4), dtype=np.float16),
    (TensorSide.INPUT, 0): NOISE,
    (TensorSide.OUTPUT, 3): np.zeros((0, 4), dtype=np.int64),
    (TensorSide.INPUT, 1): np.array(True),
}


class JoinRig:
    """Writer and joiner of one session."""

    def __init__(self, root: Path, codec: str = "zstd", **fields) -> None:
        self.root = root
        tree = DumpTree(str(root), file_mode=0o440, folder_mode=0o750, **fields)
        names, stand = MappingFiles(tree), TreeContext(str(root), 5, "20250102030405")
        self.codec = get_codec(codec)
        lines = make_table_format(DumpPlan(output=OutputSettings(str(root))), CANN, stand, 0)
        self.writer = RecordWriter(
            tree,
            names,
            codec=self.codec,
            layout=CANN,
            context=stand,
            table_format=lines,
            device_target="CPU",
        )
        self.joiner = BinFileJoiner(tree, names, self.codec, CANN)

    def member(self, sequence: int, head, array: np.ndarray) -> OperatorMember:
        key, data = head.key, array.tobytes()
        looks = {"dtype": array.dtype.name, "shape": array.shape, "byte_count": len(data)}
        head = head._replace(kind=head.kind._replace(**looks))
        elements = memoryview(data)
        record = examine_record(ReceivedRecord(FrameId("s", sequence), head, elements), None)
        (outcome,) = self.writer.write_members([record])
        assert outcome.status is RecordStatus.STORED
        member = outcome.membership
        assert member
        assert member.whole
        tensor = BinTensor(key.side, key.slot, head.kind.dtype, head.kind.shape, head.byte_count)
        return OperatorMember(
            sequence,
            outcome.path,
            member.whole,
            member.head_bytes,
            outcome.bytes_stored,
            False,
            key.timestamp_us,
            key.op_name,
            tensor,
        )

    def files(self) -> list[Path]:
        return sorted(path for path in self.root.rglob("*") if path.is_file())


@pytest.fixture
def members_of(make_head):
    def make(rig: JoinRig, tensors=TENSORS, **fields) -> list[OperatorMember]:
        return [
            rig.member(n, make_head(side=side, slot=slot, **fields), array)
            for n, ((side, slot), array) in enumerate(tensors.items(), start=1)
        ]

    return make


def read(path: Path) -> dict[tuple[TensorSide, int], np.ndarray]:
    found = bin_file.open_bin_file(path)
    assert found.header.op_name.startswith("Default/")
    assert found.header.dump_time == 1
    tensors: dict[tuple[TensorSide, int], np.ndarray] = {}
    for payload in found.payloads:
        part = payload.part
        assert isinstance(part, OpInput | OpOutput)
        if part.shape is None:
            assert part == type(part)()
            continue
        assert part.original_shape == part.shape
        assert part.format == FORMAT_NUMBERS["NCHW" if len(part.shape.dim) == 4 else "ND"]
        dtype = DATA_TYPES[part.data_type].element
        array = np.frombuffer(found.read_payload(payload), dtype).reshape(part.shape.dim)
        tensors[TensorSide(payload.kind), payload.index] = array
    return tensors


def same(found, expected) -> bool:
    return found.keys() == expected.keys() and all(
        found[place].dtype == array.dtype and np.array_equal(found[place], array)
        for place, array in expected.items()
    )


@given(
    places=st.sets(
        st.tuples(st.sampled_from(TensorSide), st.integers(0, 300)), min_size=1, max_size=4
    ),
    timestamp_us=st.integers(0, (1 << 63) - 1),
)
@example(places={(TensorSide.INPUT, 299)}, timestamp_us=0)
def test_make_bin_header_equals_serialized_message(places, timestamp_us):
    """Byte for byte, with and without a remembered part."""
    tensors = [BinTensor(side, slot, "float32", (2,), 8) for side, slot in sorted(places)]
    head = make_bin_header("Default/a", timestamp_us, tensors, CANN)
    header = bin_file.parse_bin_file(memoryview(head + bytes(8 * len(tensors)))).header
    assert (header.dump_time, header.op_name) == (timestamp_us, "Default/a")
    assert bin_file.serialize_bin_head(header) == head
    sizes = {
        (side, slot): part.size
        for side, parts in ((TensorSide.INPUT, header.input), (TensorSide.OUTPUT, header.output))
        for slot, part in enumerate(parts)
    }
    assert {place for place, size in sizes.items() if size} == places


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_member_file_is_a_complete_bin_file(tmp_path, members_of, codec):
    """Slots below its own are placeholders, and the file name has side and slot."""
    rig = JoinRig(tmp_path, codec)
    for member in members_of(rig):
        place = member.tensor.side, member.tensor.slot
        assert same(read(tmp_path / member.path), {place: TENSORS[place]})
        name = Path(member.path).name
        suffix = ".zst" if codec == "zstd" else ""
        assert name == f"MatMul.Default_MatMul-op0.0.0.1.{place[0].value}.{place[1]}{suffix}"
        assert Path(member.path).parent == Path("20250102030405/5/Net/0/0")


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("op_name", ["Default/MatMul-op0", LONG])
def test_join_writes_all_tensors_of_operator(tmp_path, members_of, codec, op_name):
    """All tensors in the order of CANN's files; shares add up to the file, with the plan's mode."""
    rig = JoinRig(tmp_path, codec)
    members = members_of(rig, op_name=op_name)
    joined = rig.joiner.join(members, mark="m")
    rig.joiner.remove(members)
    path = tmp_path / members[0].whole.path
    assert [each for each in rig.files() if each.name != "mapping.csv"] == [path]
    assert same(read(path), TENSORS)
    assert stat.S_IMODE(path.stat().st_mode) == 0o440
    assert sum(each.bytes_stored for each in joined) == path.stat().st_size
    assert [each.sequence for each in joined] == [3, 5, 2, 1, 4]
    assert path.name.endswith(".zst") is (codec == "zstd")
    if op_name == LONG:
        mapping = path.with_name("mapping.csv").read_text()
        assert mapping.count(f"{path.name},{members[0].whole.mapped_from}\n") == 1


def test_joined_file_has_same_content_with_any_codec(tmp_path, members_of):
    """Unpacked, the joined file is the one that is written without a codec."""
    for codec in ("none", "zstd"):
        rig = JoinRig(tmp_path / codec, codec)
        rig.joiner.join(members_of(rig), mark="m")
    name = "20250102030405/5/Net/0/0/MatMul.Default_MatMul-op0.0.0.1"
    packed = (tmp_path / "zstd" / f"{name}.zst").read_bytes()
    plain = get_codec("zstd").decode(packed, limit_bytes=1 << 20)
    assert bytes(plain) == (tmp_path / "none" / name).read_bytes()


def test_join_renames_file_of_only_tensor(tmp_path, members_of):
    """Its file is that of the operator under another name; saying so twice changes nothing."""
    rig = JoinRig(tmp_path)
    members = members_of(rig, {(TensorSide.OUTPUT, 1): NOISE})
    inode = (tmp_path / members[0].path).stat().st_ino
    for _ in range(2):
        (joined,) = rig.joiner.join(members, mark="m")
        rig.joiner.remove(members)
        (path,) = rig.files()
        assert path == tmp_path / members[0].whole.path
        assert path.stat().st_ino == inode
        assert path.stat().st_size == joined.bytes_stored
        assert same(read(path), {(TensorSide.OUTPUT, 1): NOISE})


def test_join_accepts_element_type_without_number(tmp_path, make_head):
    """Its bytes are kept, of a type that is not defined."""
    head = make_head(dtype="float8_e4m3fnuz", shape=(3,), byte_count=3)
    elements = memoryview(b"abc")
    record = examine_record(ReceivedRecord(FrameId("s", 1), head, elements), None)
    found = bin_file.parse_bin_file(memoryview(b"".join(encode_bin(record, CANN))))
    (part,) = found.header.output
    assert (part.data_type, part.size, bytes(found.read_payload(found.payloads[0]))) == (
        0,
        3,
        b"abc",
    )


@pytest.mark.parametrize("failing_at", range(3))
def test_join_on_full_disk_keeps_tensor_files(tmp_path, members_of, monkeypatch, failing_at):
    """Whatever write fails, nothing of the operator's file is left, and every tensor is whole."""
    countdown = itertools.count()
    armed: list[bool] = []

    def write(descriptor: int, parts) -> None:
        if armed and next(countdown) == failing_at:
            os.write(descriptor, bytes(parts[0])[:1])
            raise OSError(errno.ENOSPC, "failing on purpose")
        write_parts(descriptor, parts)

    def nothing_in_the_kernel(*_: object) -> int:
        raise OSError(errno.EXDEV, "not here")

    monkeypatch.setattr(os, "copy_file_range", nothing_in_the_kernel)
    rig = JoinRig(tmp_path, write=write)
    members = members_of(rig)
    before = {path: path.read_bytes() for path in rig.files()}
    armed.append(True)
    with pytest.raises(OSError, match="on purpose"):
        rig.joiner.join(members, mark="m")
    assert {path: path.read_bytes() for path in rig.files()} == before
    armed.clear()
    rig.joiner.join(members, mark="m")
    assert same(read(tmp_path / members[0].whole.path), TENSORS)


def test_join_copies_where_kernel_cannot(tmp_path, members_of, monkeypatch):
    """Blocks that are read and written give the same file."""
    monkeypatch.setattr(plain_files, "_BLOCK_BYTES", 1000)
    expected = JoinRig(tmp_path / "a")
    expected.joiner.join(members_of(expected), mark="m")

    def refuse(*_: object) -> int:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    rig = JoinRig(tmp_path / "b")
    members = members_of(rig)
    rig.joiner.join(members, mark="m")
    path = members[0].whole.path
    assert (tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes()


@pytest.mark.parametrize("harm", ["gone", "shorter", "longer", "link"])
def test_join_rejects_changed_tensor_file(tmp_path, members_of, harm):
    """The operator is not joined, and the files of its tensors stay."""
    rig = JoinRig(tmp_path)
    members = members_of(rig)
    path = tmp_path / members[2].path
    data = path.read_bytes()
    path.unlink()
    if harm == "link":
        path.symlink_to("/etc/passwd")
    elif harm != "gone":
        path.write_bytes(data[:-1] if harm == "shorter" else data + b"x")
    before = rig.files()
    with pytest.raises(OSError, match=r"\w"):
        rig.joiner.join(members, mark="m")
    assert rig.files() == before


def test_join_rejects_two_tensors_in_one_slot(tmp_path, members_of):
    """No file could hold them both: they stay as they are."""
    rig = JoinRig(tmp_path)
    first, *_ = members_of(rig)
    with pytest.raises(FileExistsError):
        rig.joiner.join([first, replace(first, sequence=9)], mark="m")


def test_join_handles_many_tensors(tmp_path, members_of):
    """An operator of 300 tensors is one file, written once."""
    tensors = {
        (side, slot): np.full(slot, slot, dtype=np.int32)
        for side in TensorSide
        for slot in range(150)
    }
    opened: list[int] = []

    def write(descriptor: int, parts) -> None:
        opened.append(descriptor)
        write_parts(descriptor, parts)

    rig = JoinRig(tmp_path, write=write)
    members = members_of(rig, tensors)
    opened.clear()
    rig.joiner.join(members, mark="m")
    assert len(opened) == 1
    assert same(read(tmp_path / members[0].whole.path), tensors)


def test_join_works_in_synced_tree(tmp_path, members_of):
    rig = JoinRig(tmp_path, synced=True)
    for members in (
        members_of(rig),
        members_of(rig, {(TensorSide.INPUT, 0): NOISE}, op_name="b/c"),
    ):
        rig.joiner.join(members, mark="m")
        rig.joiner.remove(members)
    assert len(rig.files()) == 2
