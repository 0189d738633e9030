"""Agent under pressure: files are stored unpacked, and packed later under the same names."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from rankdump import reader
from rankdump._analysis.fsck.tree_check import check_tree
from rankdump._codec.file_codec import SMALL_FILE_BYTES
from rankdump._codec.zstd_frames import is_stored_frame
from rankdump._core.manifest import Manifest
from rankdumpd.agent.backlog.backlog_packer import BacklogPacker
from rankdumpd.agent.backlog.pack_process import PackProcess
from rankdumpd.agent.commit import post_commit
from rankdumpd.agent.ledger.deferred_work import UnpackedFiles
from rankdumpd.agent.service import DumpAgent
from rankdumpd.agent.storage import rank_files
from rankdumpd.rebuild import rebuild_ledger
from rankdumpd.server.grpc_server import GrpcServer

WAIT_S = 300
BUSY = {"queue_bytes": 1 << 20}
"""A queue that one of these tensors fills by more than a half."""
TENSORS = [np.arange(n, n + 160_000, dtype=np.int32) // 7 for n in range(3)]
NAMES = [f"Default/layer{number}-Dense/MatMul-op{number}" for number in range(4)]


class SimulatedKill(BaseException):
    """Simulates the end of a process between two steps."""


@pytest.fixture
def held() -> Iterator[pytest.MonkeyPatch]:
    """Agents whose packing does not begin; after `undo` that of the next ones does."""
    patch = pytest.MonkeyPatch()
    patch.setattr(BacklogPacker, "start", lambda _: None)
    yield patch
    patch.undo()


def send_step(rank, frames, arrays, first: int = 1, iteration: int = 0) -> None:
    """Send an iteration of tensors, and wait until its manifest is written."""
    sent = [
        frames.record(first + n, array, iteration=iteration, op_name=NAMES[n])
        for n, array in enumerate(arrays)
    ]
    stream = rank.push()
    for frame in sent:  # one after the other, as the queue holds one of them
        stream.send(frame)
    last = first + len(sent)
    stream.send(frames.end(last, iteration, len(sent)), frames.goodbye(last + 1))
    stream.wait_acknowledged(last + 1)
    stream.finish()


def check_arrays(root: Path, arrays) -> None:
    """Every tensor reads as it was sent, and the check of the tree finds nothing."""
    entries = sorted(reader.walk(root).entries, key=lambda each: each.op_name)
    for entry, array in zip(entries, arrays, strict=True):
        assert np.array_equal(reader.load(entry), array)
    report = check_tree(root, workers=1)
    assert (report.damages, report.digests) == ((), len(arrays))


def files_of(root: Path) -> list[Path]:
    return sorted(root.glob("rank_0/*/*/*/*.npy*"))


def count_unpacked(root: Path) -> int:
    return sum(is_stored_frame(path.read_bytes()[:64]) for path in files_of(root))


def check_sizes(agent, root: Path) -> None:
    """Manifest, balance and usage have the sizes of the files, each inode once."""
    sizes = {path.stat().st_ino: path.stat().st_size for path in files_of(root)}
    (path,) = root.rglob("iteration_0.*.json")
    manifest = Manifest.from_json(path.read_bytes())
    assert sum(record.bytes_stored for record in manifest.records) == sum(sizes.values())
    assert manifest.status.bytes_stored == sum(sizes.values())
    view = agent.agent.view()
    assert [job.bytes_stored for job in view.usage] == [sum(sizes.values())]
    assert [each.bytes_stored for each in view.iterations] == [sum(sizes.values())]


def pack_all(agent) -> None:
    """Let an agent pack what waits."""
    agent.agent._backlog.finish(WAIT_S)
    assert agent.agent.view().backlog.waiting_files == 0


def test_files_are_stored_unpacked_under_pressure_and_packed_later(
    make_agent, make_rank, frames, held, short_dir
):
    """Readers, check, manifest, status and metrics know both states."""
    agent = make_agent(**BUSY)
    rank = make_rank(agent.address)
    rank.open()
    send_step(rank, frames, TENSORS)
    assert count_unpacked(rank.root) == len(TENSORS)
    check_arrays(rank.root, TENSORS)
    check_sizes(agent, rank.root)
    raw = sum(path.stat().st_size for path in files_of(rank.root))
    backlog = agent.agent.view().backlog
    assert (backlog.waiting_files, backlog.waiting_bytes) == (len(TENSORS), raw)
    names, times = files_of(rank.root), [path.stat().st_mtime_ns for path in files_of(rank.root)]
    held.undo()
    agent.agent._backlog.start()
    pack_all(agent)
    assert count_unpacked(rank.root) == 0
    assert [path.stat().st_mtime_ns for path in files_of(rank.root)] == times
    assert files_of(rank.root) == names
    check_arrays(rank.root, TENSORS)
    check_sizes(agent, rank.root)
    packed = sum(path.stat().st_size for path in names)
    backlog = agent.agent.view().backlog
    assert (backlog.packed_files, backlog.packed_bytes, backlog.saved_bytes) == (
        *(len(TENSORS), raw),
        raw - packed,
    )
    counts: Counter[str] = Counter()
    for each in (*agent.counters.samples(), *agent.agent.samples()):
        counts[each.name] += int(each.value)
    assert counts["rankdump_agent_stored_unpacked_bytes_total"] == raw
    assert counts["rankdump_agent_packed_later_bytes_total"] == raw
    assert counts["rankdump_agent_unpacked_files"] == 0
    assert not list(rank.root.rglob(".*.tmp"))
    # The files are those that a plan without delay would have.
    always = make_rank(agent.address, root=short_dir / "other", codec="zstd-always")
    always.session_id, always.job_id = "session1111", "other"
    always.open()
    send_step(always, frames, TENSORS)
    assert [path.read_bytes() for path in files_of(always.root)] == [
        path.read_bytes() for path in names
    ]


@pytest.mark.parametrize("codec", ["none", "zstd-always"])
def test_plan_can_forbid_to_pack_later(make_agent, make_rank, frames, codec):
    """Its files are at once as they stay."""
    agent = make_agent(**BUSY)
    rank = make_rank(agent.address, codec=codec)
    rank.open()
    send_step(rank, frames, TENSORS)
    assert count_unpacked(rank.root) == 0
    assert agent.agent.view().backlog.packed_files == 0
    check_arrays(rank.root, TENSORS)


@pytest.mark.parametrize("limit", ["disk_bytes", "job_bytes", "retain_bytes"])
def test_files_are_packed_at_once_near_a_limit(make_agent, make_rank, frames, limit):
    """Space wins over speed."""
    agent = make_agent(**BUSY, **{limit: 3_000_000})
    rank = make_rank(agent.address)
    rank.open()
    send_step(rank, frames, TENSORS)
    assert count_unpacked(rank.root) == 0
    check_arrays(rank.root, TENSORS)


def test_small_and_incompressible_files_are_stored_as_ever(make_agent, make_rank, frames):
    """Packing later would gain nothing."""
    noise = np.random.default_rng(4).integers(0, 256, 700_000, dtype=np.uint8)
    arrays = [noise, TENSORS[0][: SMALL_FILE_BYTES // 8]]
    rank = make_rank(make_agent(**BUSY).address)
    rank.open()
    send_step(rank, frames, arrays)
    assert [path.suffix for path in files_of(rank.root)] == [".npy", ".zst"]
    assert count_unpacked(rank.root) == 0


def test_links_to_unpacked_files_become_links_to_the_packed_one(
    make_agent, make_rank, frames, held
):
    """Equal tensors take the space of one, before and after."""
    arrays = [TENSORS[0], TENSORS[1], TENSORS[0], TENSORS[0]]
    agent = make_agent(**BUSY)
    rank = make_rank(agent.address)
    rank.open()
    send_step(rank, frames, arrays)
    for _state in ("unpacked", "packed"):
        links = Counter(path.stat().st_ino for path in files_of(rank.root))
        assert sorted(links.values()) == [1, 3]
        check_arrays(rank.root, arrays)
        check_sizes(agent, rank.root)
        while agent.agent._backlog.pack_some():
            pass
    assert count_unpacked(rank.root) == 0


def test_next_process_packs_what_waits(make_agent, make_rank, frames, held):
    """Rows are in the ledger; a session need not be live."""
    agent = make_agent(**BUSY)
    rank = make_rank(agent.address)
    rank.open()
    send_step(rank, frames, TENSORS)
    held.undo()
    agent.restart()
    pack_all(agent)
    assert count_unpacked(rank.root) == 0
    check_arrays(rank.root, TENSORS)
    sizes = [path.stat().st_size for path in files_of(rank.root)]
    assert [job.bytes_stored for job in agent.agent.view().usage] == [sum(sizes)]


def test_file_that_was_packed_before_a_crash_gets_its_size(
    make_agent, make_rank, frames, held, monkeypatch
):
    """Between the rename and the row a process may be killed."""
    agent = make_agent(**BUSY)
    rank = make_rank(agent.address)
    rank.open()
    send_step(rank, frames, TENSORS)
    with monkeypatch.context() as context:

        def die(*_args: object, **_fields: object) -> None:
            raise SimulatedKill

        context.setattr(UnpackedFiles, "enter_packed", die)
        with pytest.raises(SimulatedKill):
            agent.agent._backlog.pack_some()
    assert count_unpacked(rank.root) == 0
    check_arrays(rank.root, TENSORS)
    held.undo()
    agent.restart()
    pack_all(agent)
    check_arrays(rank.root, TENSORS)
    (path,) = rank.root.rglob("iteration_0.*.json")
    manifest = Manifest.from_json(path.read_bytes())
    sizes = sum(path.stat().st_size for path in files_of(rank.root))
    assert manifest.status.bytes_stored == sizes


def test_full_disk_leaves_files_unpacked_until_it_has_space(
    make_agent, make_rank, frames, held, monkeypatch
):
    """Nothing is lost, nothing is left over, and status says why."""
    agent = make_agent(**BUSY)
    rank = make_rank(agent.address)
    rank.open()
    send_step(rank, frames, TENSORS)
    with monkeypatch.context() as context:

        def fail(*_args: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        context.setattr(PackProcess, "pack", fail)
        with pytest.raises(OSError, match="No space"):
            agent.agent._backlog.pack_some()
    assert count_unpacked(rank.root) == len(TENSORS)
    assert not list(rank.root.rglob(".*.tmp"))
    check_arrays(rank.root, TENSORS)
    while agent.agent._backlog.pack_some():
        pass
    assert count_unpacked(rank.root) == 0
    check_sizes(agent, rank.root)


def test_removed_and_damaged_files_do_not_hold_up_others(make_agent, make_rank, frames, held):
    """A file that is gone stays gone; a damaged one is left for the check of the tree."""
    agent = make_agent(**BUSY)
    rank = make_rank(agent.address)
    rank.open()
    send_step(rank, frames, TENSORS)
    removed, damaged, whole = files_of(rank.root)
    removed.unlink()
    data = bytearray(damaged.read_bytes())
    data[16] ^= 0xFF
    damaged.chmod(0o600)
    damaged.write_bytes(data)
    while agent.agent._backlog.pack_some():
        pass
    assert not removed.exists()
    assert damaged.read_bytes() == data
    assert not is_stored_frame(whole.read_bytes())
    kinds = {each.path: each.kind.value for each in check_tree(rank.root, workers=1).damages}
    assert sorted(kinds.values()) == ["missing", "torn"]


@pytest.mark.parametrize("limit", [{"retain_s": 1e-9}, {"retain_bytes": 1}])
def test_iteration_is_packed_before_it_is_retired(
    make_agent, make_rank, frames, held, limit: dict[str, float]
):
    """No size changes while it is removed, and what waits does not count as used."""
    agent = make_agent(**BUSY)
    rank = make_rank(agent.address)
    rank.open()
    send_step(rank, frames, TENSORS)
    limits, retention = agent.agent._limits, agent.agent._retention
    limits.policy = dataclasses.replace(limits.policy, **limit)
    assert retention.remove_due() == 0
    assert len(files_of(rank.root)) == len(TENSORS)
    while agent.agent._backlog.pack_some():
        pass
    assert retention.remove_due() == 1
    assert files_of(rank.root) == []
    assert agent.agent.view().usage == ()


def test_files_of_an_open_iteration_are_packed_as_well(make_agent, make_rank, frames, held):
    """Its manifest has their sizes from the beginning."""
    agent = make_agent(**BUSY)
    rank = make_rank(agent.address)
    rank.open()
    stream = rank.push()
    for number, array in enumerate(TENSORS):
        stream.send(frames.record(1 + number, array, op_name=NAMES[number]))
    stream.wait_acknowledged(len(TENSORS))
    while agent.agent._backlog.pack_some():
        pass
    assert count_unpacked(rank.root) == 0
    stream.send(frames.end(4, 0, len(TENSORS)), frames.goodbye(5))
    stream.wait_acknowledged(5)
    stream.finish()
    check_arrays(rank.root, TENSORS)
    check_sizes(agent, rank.root)


def test_rebuilt_ledger_knows_what_waits(make_agent, make_rank, frames, held, short_dir):
    """From the sizes in the manifests; links are packed with their file."""
    arrays = [TENSORS[0], TENSORS[1], TENSORS[0]]
    agent = make_agent(**BUSY)
    rank = make_rank(agent.address)
    rank.open()
    send_step(rank, frames, arrays)
    agent.stop()
    (short_dir / "state").rename(short_dir / "lost")
    rebuild_ledger(rank.root, short_dir / "state")
    held.undo()
    agent.start()
    pack_all(agent)
    assert agent.agent.view().backlog.packed_files == 2
    assert count_unpacked(rank.root) == 0
    assert len({path.stat().st_ino for path in files_of(rank.root)}) == 2
    check_arrays(rank.root, arrays)


def stop_packing(pid: int) -> int:
    """Stop the process that an agent packs with as soon as it runs; return its number."""
    until_s = time.monotonic() + WAIT_S
    while time.monotonic() < until_s:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                for child in (task / "children").read_text().split():
                    if b"pack_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                        os.kill(int(child), signal.SIGSTOP)
                        return int(child)
    raise AssertionError("no file is packed")


def wait_until(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_agent_that_is_killed_while_it_packs_loses_nothing(make_daemon, make_rank, frames):
    """The tree is whole at that moment, and the next process packs what is left."""
    daemon = make_daemon(RANKDUMPD_AGENT__QUEUE_BYTES=str(1 << 20))
    rank = make_rank(daemon.address)
    rank.open()
    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(stop_packing, daemon.process.pid)
        send_step(rank, frames, TENSORS)
        packing = stopped.result()
    wait_until(lambda: bool(list(rank.root.rglob(".*-pack.tmp"))))
    daemon.kill()
    os.kill(packing, signal.SIGCONT)
    assert count_unpacked(rank.root) > 0
    kinds = {each.kind.value for each in check_tree(rank.root, workers=1).damages}
    assert kinds == {"leftover"}
    daemon.start()
    after = make_rank(daemon.address)
    wait_until(lambda: after.status().backlog.waiting_files == 0)
    assert count_unpacked(rank.root) == 0
    check_arrays(rank.root, TENSORS)
    assert not list(rank.root.rglob(".*.tmp"))


def start_embedded(agent) -> str:
    """Replace an agent by one that ends with its job; return its address."""
    agent.stop()
    agent.agent = DumpAgent(agent._settings, ends_with_job=True)
    agent.server = GrpcServer(agent._settings.listen, (agent.agent,))
    agent.agent.start()
    return agent.server.start()


def test_embedded_agent_writes_deferred_manifests_before_it_ends(
    make_agent, make_rank, frames, monkeypatch
):
    """Whatever the pause before the next attempt is."""
    for name in ("FIRST_RETRY_S", "LAST_RETRY_S"):
        monkeypatch.setattr(post_commit, name, 3600.0)
    write, failed = rank_files.write_manifest, threading.Event()

    def fail_once(*args, **keywords):
        if not failed.is_set():
            failed.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args, **keywords)

    monkeypatch.setattr(rank_files, "write_manifest", fail_once)
    agent = make_agent()
    rank = make_rank(start_embedded(agent))
    rank.open()
    send_step(rank, frames, TENSORS)
    assert failed.wait(WAIT_S)
    assert not list(rank.root.rglob("iteration_*.json"))
    assert agent.agent.drain(WAIT_S) == 0
    assert list(rank.root.rglob("iteration_*.json"))


def test_embedded_agent_packs_before_it_ends(make_agent, make_rank, frames):
    """No process follows that could."""
    agent = make_agent(**BUSY)
    rank = make_rank(start_embedded(agent))
    rank.open()
    send_step(rank, frames, TENSORS)
    assert agent.agent.drain(WAIT_S) == 0
    assert count_unpacked(rank.root) == 0
    check_arrays(rank.root, TENSORS)
