"""Fingerprints that an agent records: one file beside each manifest, whole whatever is killed."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import grpc
import numpy as np
import pytest

import rankdump
from rankdump._analysis.fsck.tree_check import check_tree
from rankdump._analysis.table_index import TableLag, compare_with_tree, index_tree
from rankdump._core.manifest import Manifest
from rankdump._core.plan import ContentSettings, DeliverySettings, TensorSelection
from rankdump._core.tensor_fingerprint import FINGERPRINT_BYTES
from rankdump._kernels.shard_fingerprint import compute_fingerprint
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.storage import rank_files
from rankdumpd.rebuild import rebuild_ledger

RECORDED = ContentSettings(fingerprints=True)
ROWS = ContentSettings("statistic", ("max",), fingerprints=True)
WAIT_S = 300
ARRAYS = [np.arange(6, dtype=np.float32) * scale for scale in (1, 2, 3)]
NAMES = ("Default/a-op0", "Default/b-op0", "Default/c-op0")


def pack(array: np.ndarray) -> bytes:
    found = compute_fingerprint(array)
    return found.digest.to_bytes(8, "little") + found.sketch.astype("<f4").tobytes()


def make_rows(frames, sequence: int, arrays: list[np.ndarray], **fields) -> agent_pb2.Frame:
    frame = frames.figures(sequence, [(array, f"{array.max():g}") for array in arrays], **fields)
    frame.figure_rows.fingerprints.extend(map(pack, arrays))
    return frame


def read_file(root: Path, iteration: int = 0) -> np.ndarray:
    """Return the rows of an iteration as somebody with numpy reads them."""
    (path,) = root.glob(f"rank_0/.dump_metadata/fingerprint/iteration_{iteration}.*.npy")
    return np.load(path, allow_pickle=False)


def read_manifest(root: Path, iteration: int = 0) -> Manifest:
    (path,) = root.glob(f"rank_0/.dump_metadata/manifest/iteration_{iteration}.*.json")
    return Manifest.from_json(path.read_bytes())


def check_arrays(root: Path, arrays: list[np.ndarray], iteration: int = 0) -> None:
    """The file, the table and the check of the tree agree on the fingerprints of these arrays."""
    rows = read_file(root, iteration)
    assert rows["record"].tolist() == list(range(len(arrays)))
    assert [row.tobytes()[4:] for row in rows] == list(map(pack, arrays))
    found = rankdump.open(root).where(iteration=iteration).table().to_pylist()
    assert [
        row["fingerprint"].to_bytes(8, "little") + np.array(row["sketch"], "<f4").tobytes()
        for row in found
    ] == list(map(pack, arrays))
    assert check_tree(root, workers=1).damages == ()


def test_agent_computes_fingerprints_of_tensors(make_agent, make_rank, frames):
    """Also of one that becomes a link to equal bytes, and none without the setting."""
    agent = make_agent()
    arrays = [*ARRAYS, np.arange(4096, dtype=np.int16), np.arange(4096, dtype=np.int16)]
    for job, content in (("on", RECORDED), ("off", ContentSettings())):
        rank = make_rank(agent.address, content=content, session_id=job, job_id=job)
        rank.root = rank.root.with_name(job)
        rank.open()
        records = [
            frames.record(n + 1, array, op_name=f"Default/{n}-op0")
            for n, array in enumerate(arrays)
        ]
        stream = rank.push().send(*records, frames.end(6, 0, 5), frames.goodbye(7))
        assert stream.finish() is grpc.StatusCode.OK
        if content is RECORDED:
            check_arrays(rank.root, arrays)
            assert read_manifest(rank.root).status.linked == 1
        else:
            assert read_manifest(rank.root).fingerprints is None
            assert list(rank.root.rglob("*/fingerprint")) == []


def test_rows_bring_their_fingerprints(make_agent, make_rank, frames):
    """A row that the plan excludes takes its own along; so does a rank without memory."""
    selection = TensorSelection(inputs=False)
    rank = make_rank(make_agent().address, content=ROWS, selection=selection)
    rank.open()
    rows = make_rows(frames, 1, ARRAYS)
    kind = agent_pb2.TensorKind.FromString(rows.figure_rows.kinds[1])
    kind.side = agent_pb2.SIDE_INPUT
    rows.figure_rows.kinds[1] = kind.SerializeToString()
    stream = rank.push().send(rows, frames.end(2, 0, 3), frames.goodbye(3))
    assert stream.finish() is grpc.StatusCode.OK
    check_arrays(rank.root, [ARRAYS[0], ARRAYS[2]])
    assert read_manifest(rank.root).status.dropped == {"side_excluded": 1}


def test_degraded_tensor_keeps_its_fingerprint(make_agent, make_rank, frames):
    delivery = DeliverySettings(on_full="statistic")
    content = ContentSettings("full", ("max",), fingerprints=True)
    rank = make_rank(make_agent().address, content=content, delivery=delivery)
    rank.open()
    whole = frames.record(1, ARRAYS[0])
    less = make_rows(frames, 2, ARRAYS[1:], degraded="buffer_full")
    stream = rank.push().send(whole, less, frames.end(3, 0, 3), frames.goodbye(4))
    assert stream.finish() is grpc.StatusCode.OK
    check_arrays(rank.root, ARRAYS)


def test_tensor_without_fingerprint_has_none(make_agent, make_rank, frames):
    rank = make_rank(make_agent().address, content=RECORDED)
    rank.open()
    odd = frames.record(
        1, np.zeros(4, np.uint8), dtype="float8_e4m3fn", op_name=NAMES[0], byte_count=4
    )
    stream = rank.push().send(
        odd, frames.record(2, ARRAYS[0]), frames.end(3, 0, 2), frames.goodbye(4)
    )
    assert stream.finish() is grpc.StatusCode.OK
    rows = rankdump.open(rank.root).table().to_pylist()
    assert [row["fingerprint"] is None for row in rows] == [True, False]
    assert read_file(rank.root)["record"].tolist() == [1]


@pytest.mark.parametrize("content", [RECORDED, ROWS], ids=["tensors", "rows"])
def test_killed_agent_loses_no_fingerprint(make_daemon, make_rank, frames, content):
    """They are in the ledger until their iteration ends; then a rebuilt ledger needs none."""
    daemon = make_daemon()
    rank = make_rank(daemon.address, content=content)
    rank.open()
    sent = (
        [make_rows(frames, 1, ARRAYS[:2])]
        if content is ROWS
        else [frames.record(1, ARRAYS[0]), frames.record(2, ARRAYS[1])]
    )
    last = sent[-1].sequence
    rank.push().send(*sent).wait_acknowledged(last)
    daemon.kill()
    daemon.start()
    rank.open()
    stream = rank.push().send(frames.end(last + 1, 0, 2), frames.goodbye(last + 2))
    assert stream.finish() is grpc.StatusCode.OK
    check_arrays(rank.root, ARRAYS[:2])
    daemon.kill()
    before = read_manifest(rank.root)
    shutil.rmtree(daemon.folder / "state")
    assert rebuild_ledger(rank.root, daemon.folder / "state").records == 2
    daemon.start()
    assert read_manifest(rank.root) == before
    check_arrays(rank.root, ARRAYS[:2])


def test_file_is_written_again_where_the_manifest_failed(
    make_agent, make_rank, frames, monkeypatch
):
    """Until its manifest is there, nothing reads it; a file that is left is replaced."""
    write, failed = rank_files.write_manifest, list[int]()

    def fail_once(tree, folder, manifest):
        if not failed:
            failed.append(1)
            (left,) = tree.root.glob("rank_0/.dump_metadata/fingerprint/*.npy")
            left.chmod(0o640)
            left.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        write(tree, folder, manifest)

    monkeypatch.setattr(rank_files, "write_manifest", fail_once)
    rank = make_rank(make_agent().address, content=RECORDED)
    rank.open()
    stream = rank.push().send(frames.record(1, ARRAYS[0]), frames.end(2, 0, 1), frames.goodbye(3))
    assert stream.finish() is grpc.StatusCode.OK
    deadline_s = time.monotonic() + WAIT_S
    while not list(rank.root.glob("rank_0/.dump_metadata/manifest/*.json")):
        assert time.monotonic() < deadline_s, rank.status().findings
        time.sleep(0.02)
    assert failed
    check_arrays(rank.root, ARRAYS[:1])


def test_table_of_the_agent_has_the_sketches(make_agent, make_rank, frames):
    agent = make_agent(table=True)
    rank = make_rank(agent.address, content=RECORDED)
    rank.open()
    records = [frames.record(n + 1, array) for n, array in enumerate(ARRAYS)]
    stream = rank.push().send(*records, frames.end(4, 0, 3), frames.goodbye(5))
    assert stream.finish() is grpc.StatusCode.OK
    agent.agent._table.finish(WAIT_S)
    assert compare_with_tree(rank.root) == TableLag(0, 0)
    check_arrays(rank.root, ARRAYS)
    assert index_tree(rank.root).files == 0
    (row,) = rankdump.open(rank.root).sql(
        "SELECT count(sketch) AS sketches, count(DISTINCT fingerprint) AS different FROM tensors"
    ).to_pylist()  # fmt: skip
    assert row == {"sketches": 3, "different": 3}


def test_damaged_file_is_one_line_of_the_check(make_agent, make_rank, frames):
    rank = make_rank(make_agent().address, content=RECORDED)
    rank.open()
    stream = rank.push().send(frames.record(1, ARRAYS[0]), frames.end(2, 0, 1), frames.goodbye(3))
    assert stream.finish() is grpc.StatusCode.OK
    (path,) = rank.root.glob("rank_0/.dump_metadata/fingerprint/*.npy")
    path.chmod(0o640)
    good = path.read_bytes()
    assert len(good) == 192 + 4 + FINGERPRINT_BYTES
    for at in (0, 100, 195, len(good) - 1):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        (damage,) = check_tree(rank.root, workers=1).damages
        assert (damage.kind.value, damage.path) == ("torn", str(path.relative_to(rank.root)))
        assert "its digest is" in damage.text
    path.write_bytes(good[:-1])
    (damage,) = check_tree(rank.root, workers=1).damages
    assert damage.text == "it has 459 bytes, but its manifest has 460"
    path.unlink()
    (damage,) = check_tree(rank.root, workers=1).damages
    assert damage.kind.value == "missing"
    path.symlink_to("/dev/zero")
    kinds = {each.kind.value for each in check_tree(rank.root, workers=1).damages}
    assert kinds == {"torn", "foreign"}
