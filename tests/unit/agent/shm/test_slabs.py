"""Tests of slabs: shares of memory, the order of releases, slab files and their folder."""

from __future__ import annotations

import fcntl
import os
import stat
import struct
from pathlib import Path

import pytest

from rankdump._shm.slab_format import MIN_RING_BYTES, compute_slab_bytes
from rankdump._shm.slab_ring import SlabReader
from rankdump.errors import ConfigError, CorruptedError, ExhaustedError, UnavailableError
from rankdumpd.agent.shm.ring_reader import ReleaseQueue
from rankdumpd.agent.shm.slab_file import make_slab
from rankdumpd.agent.shm.slab_folder import (
    SESSION_BYTES,
    MemoryShares,
    SlabFolder,
    find_group_id,
    find_slab_folder,
    is_in_memory,
    parse_session_id,
    share_memory,
)

GIB = 1 << 30
ROOMY = MemoryShares(GIB, 0, GIB)


class TestReleaseQueue:
    def test_releases_only_acknowledged_prefix(self):
        """Entries after one that is still needed are not released, copied or not."""
        releases = ReleaseQueue(0)
        for sequence, copied in [(1, False), (2, True), (3, False), (4, False)]:
            releases.add(sequence, sequence * 100, copied=copied)
        assert releases.pop() == 0
        releases.acknowledge(1)
        assert releases.pop() == 200
        assert releases.pop() == 0
        releases.acknowledge(4)
        assert releases.pop() == 400

    def test_releases_entries_that_were_acknowledged_before_they_were_read(self):
        """A frame that is sent again needs no second acknowledgement, and no number goes back."""
        releases = ReleaseQueue(7)
        releases.acknowledge(5)
        releases.add(7, 64, copied=False)
        assert releases.pop() == 64


class TestMemoryShares:
    @pytest.mark.parametrize(
        ("memory", "machine", "queue", "record", "expected"),
        [
            (0, 8 * GIB, GIB, 16 * GIB, MemoryShares(4 * GIB, 2 * GIB, 2 * GIB)),
            (0, 8 * GIB, GIB, GIB // 2, MemoryShares(4 * GIB, GIB, GIB // 2)),
            (0, GIB, GIB, GIB, MemoryShares(GIB + 16 * SESSION_BYTES, GIB, GIB)),
            (3 * GIB, 8 * GIB, GIB, 16 * GIB, MemoryShares(3 * GIB, 3 * GIB // 2, 3 * GIB // 2)),
        ],
    )
    def test_share_memory_divides_limit(self, memory, machine, queue, record, expected):
        """The largest record, which passes the queue alone, occupies at most half."""
        shares = share_memory(
            memory, machine_bytes=machine, queue_bytes=queue, max_record_bytes=record
        )
        assert shares == expected

    def test_faults_count_queue_slabs_and_sessions(self):
        """Queue, slabs and sessions together stay under the limit; to the byte."""
        cap = MemoryShares(10 * SESSION_BYTES, 5 * SESSION_BYTES, 1)
        assert cap.session_fault(slab_bytes=2 * SESSION_BYTES, sessions=2) == ""
        fault = cap.session_fault(slab_bytes=2 * SESSION_BYTES + 1, sessions=2)
        assert f"{SESSION_BYTES - 1} of the agent's {10 * SESSION_BYTES}" in fault
        assert cap.slab_fault(100, slab_bytes=0, sessions=5).startswith("a slab needs 100 bytes")


class TestSlabFile:
    def test_in_use_counts_lock_of_this_process(self, tmp_path: Path):
        """A rank within the agent's own process is seen as well: its lock is not the agent's."""
        slab = make_slab(tmp_path / "a.slab", compute_slab_bytes(0), group=-1)
        assert not slab.is_in_use()
        with (tmp_path / "a.slab").open("r+b") as rank:
            fcntl.lockf(rank, fcntl.LOCK_EX)
            assert slab.is_in_use()
            fcntl.lockf(rank, fcntl.LOCK_UN)
        assert not slab.is_in_use()
        slab.close()

    def test_check_detects_changed_size(self, tmp_path: Path):
        """A file that changed its size, or was given up, is not read any more."""
        path = tmp_path / "a.slab"
        slab = make_slab(path, compute_slab_bytes(0), group=-1)
        slab.check()
        os.truncate(path, slab.length + 1)
        with pytest.raises(CorruptedError, match=f"now has {slab.length + 1}"):
            slab.check()
        slab.close()
        with pytest.raises(CorruptedError, match="is closed"):
            slab.check()

    def test_elements_outlive_removal(self, tmp_path: Path):
        """Elements are readable while referenced; the descriptor is closed with the last one."""
        slab = make_slab(tmp_path / "a.slab", compute_slab_bytes(0), group=-1)
        elements = slab.elements_at(0, 6)
        number = elements.file.number
        slab.remove()
        slab.remove()
        assert bytes(elements.load()) == b"RDSLAB"
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(CorruptedError, match="is closed"):
            slab.elements_at(0, 6)
        del elements
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)

    def test_truncated_elements_are_corrupted(self, tmp_path: Path):
        """Also between a look at the size and the reading: no signal, an error."""
        path = tmp_path / "a.slab"
        slab = make_slab(path, compute_slab_bytes(0), group=-1)
        elements = slab.elements_at(slab.length - 10, 10)
        os.truncate(path, slab.length - 4)
        with pytest.raises(CorruptedError, match="ends 4 bytes before"):
            elements.load()
        os.truncate(path, 0)
        with pytest.raises(CorruptedError, match="ends 8 bytes before"):
            slab.read_number(64)
        slab.close()

    def test_remove_keeps_successor_at_its_path(self, tmp_path: Path):
        """An old slab that is removed late does not take the new one of its session with it."""
        first = make_slab(tmp_path / "a.slab", compute_slab_bytes(0), group=-1)
        second = make_slab(tmp_path / "a.slab", compute_slab_bytes(0), group=-1)
        first.remove()
        assert (tmp_path / "a.slab").stat().st_ino == os.fstat(second._opened.number).st_ino
        second.close()


class TestSlabFolder:
    def test_make_stays_within_memory_limit(self, tmp_path: Path):
        """The smallest slab has a ring; a second does not fit until the first is removed."""
        cap = MemoryShares(SESSION_BYTES + compute_slab_bytes(0) * 3 // 2, 0, 1)
        slabs = SlabFolder(tmp_path / "s", group=-1, ring_bytes=GIB, memory=cap)
        first = slabs.make("a", wanted_bytes=1, sessions=1)
        assert SlabReader(first).ring_bytes == MIN_RING_BYTES
        with pytest.raises(ExhaustedError, match="are left"):
            slabs.make("b", wanted_bytes=1, sessions=1)
        slabs.remove("a", first)
        assert slabs.held_bytes == 0
        slabs.remove("b", slabs.make("b", wanted_bytes=1, sessions=1))
        slabs.leave()
        assert list(tmp_path.iterdir()) == []

    def test_rejects_second_agent_in_folder(self, tmp_path: Path):
        """A second agent is rejected and changes nothing; after the first left, it is accepted."""
        folder = tmp_path / "s"
        first = SlabFolder(folder, group=-1, ring_bytes=GIB, memory=ROOMY)
        first.make("a", wanted_bytes=1, sessions=1).close()
        with pytest.raises(UnavailableError, match=r"runtime_dir.* has the slabs of another"):
            SlabFolder(folder, group=-1, ring_bytes=GIB, memory=ROOMY)
        assert [path.name for path in folder.iterdir()] == ["a.slab"]
        first.leave()
        SlabFolder(folder, group=-1, ring_bytes=GIB, memory=ROOMY).remove_strays((), lambda _: None)
        assert list(folder.iterdir()) == []

    def test_locks_folder_that_was_removed_meanwhile(self, tmp_path: Path, monkeypatch):
        """A lock on the removed folder is worthless, so the folder is made and locked again."""
        folder, flock = tmp_path / "s", fcntl.flock

        def late(number: int, how: int) -> None:
            monkeypatch.setattr(fcntl, "flock", flock)
            folder.rmdir()
            flock(number, how)

        monkeypatch.setattr(fcntl, "flock", late)
        first = SlabFolder(folder, group=-1, ring_bytes=GIB, memory=ROOMY)
        with pytest.raises(UnavailableError):
            SlabFolder(folder, group=-1, ring_bytes=GIB, memory=ROOMY)
        first.leave()
        assert not folder.exists()

    def test_name_of_slab_contains_secret_hash(self, tmp_path: Path):
        """Members of the group can enter the folder, but not list it."""
        slabs = SlabFolder(tmp_path / "s", group=-1, ring_bytes=GIB, memory=ROOMY)
        secret_hash = "0123456789abcdef" * 4
        slab = slabs.make("a", wanted_bytes=1, sessions=1, secret_hash=secret_hash)
        assert slab.path == tmp_path / "s" / "a.0123456789abcdef.slab"
        assert stat.S_IMODE(slab.path.parent.stat().st_mode) == 0o710
        found = slabs.find("a", secret_hash=secret_hash)
        assert found
        assert found.path.samefile(slab.path)
        assert slabs.find("a", secret_hash="f" * 64) is None
        slabs.remove_strays({"a"}, lambda _: None)
        assert slab.path.exists()
        assert parse_session_id(slab.path.name) == parse_session_id("a.slab") == "a"

    def test_failed_slab_occupies_no_memory(self, tmp_path: Path):
        """A folder that is a file costs the slab, not the memory it would have had."""
        (tmp_path / "s").write_text("in the way")
        slabs = SlabFolder(tmp_path / "s", group=-1, ring_bytes=GIB, memory=ROOMY)
        with pytest.raises(ExhaustedError, match="a slab of"):
            slabs.make("a", wanted_bytes=1, sessions=1)
        assert slabs.held_bytes == 0

    def test_remove_strays_keeps_slabs_in_use(self, tmp_path: Path):
        """Only slabs that neither a session of the ledger nor a process needs are removed."""
        for name in ("needed", "used", "stray"):
            make_slab(tmp_path / f"{name}.slab", compute_slab_bytes(0), group=-1).close()
        # A rank's own kind of lock would end with any look at the file in its process.
        holder = os.open(tmp_path / "used.slab", os.O_RDWR)
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        fcntl.fcntl(holder, fcntl.F_OFD_SETLK, lock)
        slabs = SlabFolder(tmp_path, group=-1, ring_bytes=GIB, memory=ROOMY)
        slabs.remove_strays({"needed"}, lambda _: None)
        assert {path.name for path in tmp_path.iterdir()} == {"needed.slab", "used.slab"}
        os.close(holder)


class TestSlabFolderSettings:
    def test_folder_is_beside_socket_by_default(self, tmp_path: Path):
        """One mount shows a container socket and slabs; an agent without a socket has none."""
        assert find_slab_folder("", tmp_path / "agent.sock") == tmp_path / "slabs"
        assert find_slab_folder("/elsewhere", tmp_path / "agent.sock") == Path("/elsewhere/slabs")
        assert find_slab_folder("/elsewhere", None) is None

    @pytest.mark.parametrize(
        ("folder", "expected"),
        [("/run/x", True), ("/data", False), ("/run/disk/x", False), ("/a b/c", True)],
    )
    def test_is_in_memory_detects_memory_file_systems(self, folder: str, expected: bool):
        """The innermost mount counts."""
        mounts = (
            "1 0 0:1 / / rw - ext4 /dev/a rw\n"
            "2 1 0:2 / /run rw shared:1 - tmpfs tmpfs rw\n"
            "3 2 0:3 / /run/disk rw - xfs /dev/b rw\n"
            "4 1 0:4 / /a\\040b rw - tmpfs tmpfs rw\n"
        )
        assert is_in_memory(Path(folder), mounts) is expected

    def test_find_group_id_returns_number_of_group(self):
        """-1 for no name; ConfigError for an unknown name."""
        assert find_group_id("") == -1
        assert find_group_id("root") == 0
        with pytest.raises(ConfigError, match="runtime_group"):
            find_group_id("no such group")
