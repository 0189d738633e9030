"""Bin files on disk: which parts are read, and when."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.bin_files import GOLDEN, file_of, headers, operator, packed_file_of

from rankdump._binfile import bin_file as source_module
from rankdump._binfile.bin_file import (
    BinFile,
    DiskSource,
    PackedSource,
    open_bin_file,
    parse_bin_file,
    read_bin_header,
)
from rankdump._binfile.header_parts import DumpData, OpBuffer, OpInput, OpOutput, Shape, Workspace
from rankdump._codec.file_codec import ZstdCodec
from rankdump.errors import CorruptedError, EmptyFileError


def contents(found: BinFile) -> list[tuple[str, int, bytes]]:
    """Every payload in the order of the file."""
    return [(p.kind, p.index, bytes(found.read_payload(p))) for p in found.payloads]


def written(folder: Path, name: str, data: bytes) -> Path:
    """A file."""
    path = folder / name
    path.write_bytes(data)
    return path


def test_bin_file_orders_payloads_by_kind():
    """Inputs, outputs, buffers, workspaces, whatever the order in the header."""
    header = DumpData(
        input=(OpInput(size=1), OpInput(size=2)),
        output=(OpOutput(size=3),),
        buffer=(OpBuffer(size=1),),
        space=(Workspace(size=2),),
    )
    assert contents(parse_bin_file(memoryview(file_of(header, [b"abbcccdee"])))) == [
        ("input", 0, b"a"),
        ("input", 1, b"bb"),
        ("output", 0, b"ccc"),
        ("l1buffer", 0, b"d"),
        ("space", 0, b"ee"),
    ]


@given(header=headers, seed=st.binary(min_size=40, max_size=40))
def test_bin_file_is_the_same_however_it_is_packed(
    tmp_path_factory: pytest.TempPathFactory, header: DumpData, seed: bytes
):
    """Plain, in our frames, in one frame, in frames cut anywhere: the same header and payloads."""
    parts = (*header.input, *header.output, *header.buffer, *header.space)
    plain = file_of(header, [seed[: part.size] for part in parts])
    due = parse_bin_file(memoryview(plain))
    pieces = [plain[: len(plain) // 3], b"", plain[len(plain) // 3 :]]
    frames = b"".join(b"".join(ZstdCodec().encode([piece])) for piece in pieces)
    folder = tmp_path_factory.mktemp("bin")
    for name, data in (
        ("plain", plain),
        ("ours.zst", packed_file_of(plain)),
        ("one.zst", b"".join(ZstdCodec().encode([plain]))),
        ("cut.zst", frames),
    ):
        path = written(folder, name, data)
        found = open_bin_file(path)
        assert found.header == due.header == read_bin_header(path)
        assert contents(found) == contents(due)


@pytest.mark.parametrize("kind", [OpInput, OpOutput])
def test_bin_file_recognises_placeholders(kind: type[OpInput | OpOutput]):
    """A slot that was not dumped is empty; any type, size or extent makes it a tensor."""
    assert kind().is_placeholder
    assert kind(shape=Shape(), format=2).is_placeholder
    assert not kind(data_type=1).is_placeholder
    assert not kind(size=1).is_placeholder
    assert not kind(shape=Shape((0,))).is_placeholder


def test_bin_file_ignores_trailing_bytes(tmp_path: Path):
    """Bytes behind the last payload belong to none."""
    found = open_bin_file(written(tmp_path, "a", GOLDEN + b"more"))
    assert contents(found) == contents(parse_bin_file(memoryview(GOLDEN)))


@pytest.mark.parametrize("data", [b"", b"\0", GOLDEN[:7], GOLDEN[:8]])
def test_bin_file_of_few_bytes_is_empty(tmp_path: Path, data: bytes):
    """A file of up to eight bytes raises EmptyFileError."""
    for name, stored in (("a", data), ("a.zst", b"".join(ZstdCodec().encode([data])))):
        path = written(tmp_path, name, stored)
        for opens in (open_bin_file, read_bin_header):
            with pytest.raises(EmptyFileError, match=f"^{path}: empty: {len(data)} bytes"):
                opens(path)


def test_bin_file_may_have_no_payloads(tmp_path: Path):
    """An operator without tensors is a file, too."""
    path = written(tmp_path, "a", file_of(DumpData(op_name="x"), []))
    assert open_bin_file(path).payloads == ()
    assert read_bin_header(path).op_name == "x"


def test_bin_file_reads_one_payload_alone(tmp_path: Path):
    """Damage to one payload of a packed file does not touch the others."""
    plain = operator(b"a" * 999, os.urandom(500), b"c" * 999)
    packed = bytearray(packed_file_of(plain))
    middle = packed.index(
        parse_bin_file(memoryview(plain)).read_payload(
            parse_bin_file(memoryview(plain)).payloads[1]
        )
    )
    packed[middle + 250] ^= 1
    found = open_bin_file(written(tmp_path, "a.zst", bytes(packed)))
    first, second, third = found.payloads
    assert found.read_payload(first) == b"a" * 999
    assert found.read_payload(third) == b"c" * 999
    with pytest.raises(CorruptedError, match=r"a\.zst: damaged: zstd frame cannot be read"):
        found.read_payload(second)


def test_read_bin_header_reads_only_the_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A listing reads the first frame, or the header's bytes, of a file however large."""
    plain = operator(os.urandom(1 << 20), bytes(1 << 20))
    seen: list[int] = []

    class Counted(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            data = super().read(size) or b""
            seen.append(len(data))
            return data

    @contextmanager
    def counted(disk: DiskSource):
        with Counted(disk.path) as file:
            yield file

    monkeypatch.setattr(DiskSource, "open", counted)
    for name, data in (("a", plain), ("a.zst", packed_file_of(plain))):
        path = written(tmp_path, name, data)
        seen.clear()
        assert read_bin_header(path).op_name == "a/b"
        assert 0 < sum(seen) < 500
        assert len(open_bin_file(path).payloads) == 2
        assert sum(seen) < 2000


def test_read_bin_header_does_not_unpack_a_large_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of a file in one frame only so much is unpacked."""
    monkeypatch.setattr(source_module, "_MAX_START_BYTES", 1000)
    path = written(tmp_path, "a.zst", b"".join(ZstdCodec().encode([operator(bytes(1 << 20))])))
    assert read_bin_header(path).op_name == "a/b"
    long = operator(b"x", dfx_message="long " * 1000)
    path = written(tmp_path, "b.zst", b"".join(ZstdCodec().encode([long])))
    assert read_bin_header(path).dfx_message == "long " * 1000


@pytest.mark.parametrize("name", ["a", "a.zst"])
def test_bin_file_that_changed_is_corrupted(tmp_path: Path, name: str):
    """What was there when the file was opened is read, or nothing."""
    plain = operator(b"abc")
    data = packed_file_of(plain) if name == "a.zst" else plain
    path = written(tmp_path, name, data)
    found = open_bin_file(path)
    path.write_bytes(data + b"x")
    with pytest.raises(CorruptedError, match=f"^{path}: changed while it was read"):
        found.read_payload(found.payloads[0])
    path.unlink()
    with pytest.raises(CorruptedError, match=f"^{path}: cannot be read: No such file"):
        found.read_payload(found.payloads[0])


def test_open_bin_file_rejects_other_files(tmp_path: Path):
    """A folder, a pipe without a writer, a missing file."""
    os.mkfifo(tmp_path / "pipe")
    for opens in (open_bin_file, read_bin_header):
        for path in (tmp_path, tmp_path / "pipe"):
            with pytest.raises(CorruptedError, match=f"^{path}: not a regular file"):
                opens(path)
        with pytest.raises(CorruptedError, match="missing: cannot be read: No such file"):
            opens(tmp_path / "missing")


@pytest.mark.parametrize("which", ["input", "output", "buffer", "space"])
@pytest.mark.parametrize("size", [4, 1 << 31, 1 << 63, (1 << 64) - 1])
def test_bin_file_names_a_payload_beyond_its_end(tmp_path: Path, which: str, size: int):
    """A payload that is not there, as of a tensor whose address was null, is named."""
    kinds = {"input": OpInput, "output": OpOutput, "buffer": OpBuffer, "space": Workspace}
    word = "l1buffer" if which == "buffer" else which
    parts = (kinds[which](size=3), kinds[which](size=size))
    header = replace(DumpData(), **{which: parts})
    path = written(tmp_path, "a", file_of(header, [b"abc"]))
    for opens in (open_bin_file, read_bin_header):
        with pytest.raises(
            CorruptedError,
            match=f"a: damaged: according to its header, {word} 1 of {size} bytes ends at byte",
        ):
            opens(path)


def test_bin_file_sizes_do_not_overflow(tmp_path: Path):
    """A sum that would be 3 in 64 bits is not 3."""
    header = DumpData(output=(OpOutput(size=(1 << 64) - 1), OpOutput(size=4)))
    with pytest.raises(CorruptedError, match="output 0 of 18446744073709551615 bytes"):
        open_bin_file(written(tmp_path, "a", file_of(header, [b"abc"])))


def test_read_bin_header_rejects_an_impossible_packed_size(tmp_path: Path):
    """The header alone shows that the rest of the file cannot hold so much."""
    header = DumpData(output=(OpOutput(size=1 << 40),))
    packed = b"".join(ZstdCodec().encode([file_of(header, [])]))
    path = written(tmp_path, "a.zst", packed)
    with pytest.raises(CorruptedError, match="output 0 of 1099511627776 bytes"):
        read_bin_header(path)


def test_bin_file_unpacks_a_frame_once(tmp_path: Path):
    """Of a file that is one frame the payloads do not cost a frame each."""
    plain = operator(b"a" * 99, b"b" * 99)
    found = open_bin_file(written(tmp_path, "a.zst", b"".join(ZstdCodec().encode([plain]))))
    assert isinstance(found.source, PackedSource)
    first, second = (found.read_payload(payload) for payload in found.payloads)
    assert first.obj is second.obj


def test_zstd_command_unpacks_bin_files(tmp_path: Path):
    """`zstd -d` of a packed file is the plain file."""
    command = shutil.which("zstd")
    assert command is not None or os.environ.get("CI") != "true"
    if command is not None:
        plain = operator(b"a" * 99, b"", os.urandom(99))
        path = written(tmp_path, "a.zst", packed_file_of(plain))
        done = subprocess.run([command, "-dc", path], capture_output=True, check=True)
        assert done.stdout == plain


def test_bin_file_describes_an_absurd_header(tmp_path: Path):
    """The message has the file, the declared size and the actual one."""
    path = tmp_path / "a"
    path.write_bytes((8459004121934077987).to_bytes(8, "little") + bytes(100))
    with pytest.raises(CorruptedError) as caught:
        open_bin_file(path)
    assert str(caught.value) == (
        f"{path}: damaged, or not a bin file: its first 8 bytes declare a header "
        f"of 8459004121934077987 bytes, but only 100 follow"
    )
