"""The process that packs files: descriptors in, sizes out."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankdump._codec.file_codec import get_codec
from rankdump._codec.zstd_frames import make_stored_frame
from rankdump.errors import CorruptedError
from rankdumpd.agent.backlog.pack_process import PackProcess
from rankdumpd.agent.records import FileDescriptor

PARTS = (b"head".ljust(128), bytes(range(256)) * 1000)


@pytest.fixture
def process() -> Iterator[PackProcess]:
    made = PackProcess(is_idle=True)
    yield made
    made.close()


def write_source(folder: Path, data: bytes) -> FileDescriptor:
    (folder / "source").write_bytes(data)
    return FileDescriptor(os.open(folder / "source", os.O_RDONLY))


def open_target(folder: Path, mode: int = os.O_RDWR) -> FileDescriptor:
    (folder / "target").write_bytes(b"")
    return FileDescriptor(os.open(folder / "target", mode))


def pack(process: PackProcess, source: FileDescriptor, target: FileDescriptor) -> int:
    """Both stay open until it is done."""
    return process.pack(source.number, target.number)


def test_process_packs_as_the_codec_does(process: PackProcess, tmp_path: Path):
    """The bytes are those of a file that is packed at once."""
    source = write_source(tmp_path, b"".join(make_stored_frame(PARTS)))
    expected = b"".join(get_codec("zstd").encode(PARTS))
    for _ in range(2):
        size = pack(process, source, open_target(tmp_path))
        assert size == len(expected)
        assert (tmp_path / "target").read_bytes() == expected


@pytest.mark.parametrize(("is_idle", "policy"), [(True, os.SCHED_IDLE), (False, os.SCHED_OTHER)])
def test_process_is_idle_unless_it_is_urgent(tmp_path: Path, is_idle: bool, policy: int):
    """It runs where a core has nothing else to do."""
    process = PackProcess(is_idle=is_idle)
    try:
        source = write_source(tmp_path, b"".join(make_stored_frame(PARTS)))
        pack(process, source, open_target(tmp_path))  # it has begun by then
        pid = process._process.pid
        assert os.sched_getscheduler(pid) == policy
        session = Path(f"/proc/{pid}/autogroup")
        if is_idle and session.exists():
            assert session.read_text().endswith("nice 19\n")
    finally:
        process.close()


def test_other_files_are_rejected(process: PackProcess, tmp_path: Path):
    """Files that are packed already, or damaged; the process goes on."""
    frame = b"".join(make_stored_frame(PARTS))
    for data in (b"", b"".join(get_codec("zstd").encode(PARTS)), frame[:-1], frame + b"x"):
        with pytest.raises(CorruptedError, match=r"stored|cannot be read"):
            pack(process, write_source(tmp_path, data), open_target(tmp_path))
    source = write_source(tmp_path, frame)
    assert pack(process, source, open_target(tmp_path)) < len(frame)


def test_error_of_a_disk_is_that_of_the_call(process: PackProcess, tmp_path: Path):
    """With its number."""
    source = write_source(tmp_path, b"".join(make_stored_frame(PARTS)))
    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        pack(process, source, open_target(tmp_path, os.O_RDONLY))
    assert caught.value.errno == errno.EBADF
    assert not process.has_failed


def test_end_of_the_process_is_transient(process: PackProcess, tmp_path: Path):
    """Another one can be started."""
    source = write_source(tmp_path, b"".join(make_stored_frame(PARTS)))
    process._process.kill()
    process._process.wait()
    with pytest.raises(BlockingIOError, match="has ended"):
        pack(process, source, open_target(tmp_path))
    assert process.has_failed


def test_process_ends_with_its_channel(process: PackProcess):
    """As when the agent is killed."""
    process._channel.close()
    assert process._process.wait(60) == 0
