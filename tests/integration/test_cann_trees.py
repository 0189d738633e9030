"""CANN's trees written by an agent: every tensor once, in every layout."""

from __future__ import annotations

import csv
import errno
import itertools
import os
import random
import threading
from collections import Counter
from pathlib import Path

import grpc
import numpy as np
import pytest
from support.npy_arrays import view_npy_array as npy_array
from support.slab_agents import wait_until

from rankdump._binfile import bin_file
from rankdump._binfile.header_parts import OpInput, OpOutput
from rankdump._codec.file_codec import select_codec
from rankdump._core.cann_types import DATA_TYPES
from rankdump._core.manifest import Manifest
from rankdump._core.plan import ContentSettings, DeliverySettings
from rankdump._layout import statistic_tables
from rankdump._layout.file_name import parse_file_name
from rankdump._layout.tree_layouts import LAYOUTS
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.commit import committer, iteration_end, post_commit
from rankdumpd.agent.ledger.agent_ledger import AgentLedger
from rankdumpd.agent.storage import session_storage
from rankdumpd.agent.storage.tree import DumpTree, write_parts

STAMP = 1_700_000_000_000_000
WAIT_S = 300
STARTED = "20250102030405"
IN, OUT = agent_pb2.SIDE_INPUT, agent_pb2.SIDE_OUTPUT
FOLDERS = {
    "cann": f"{STARTED}/0/Net/0/7",
    "cann-step": f"7/{STARTED}/0/Net/0/7",
    "cann-op": f"{STARTED}/0",
    "cann-op-step": f"7/{STARTED}/0",
    "mindspore-async": "rank_0/Net/0/7",
    "mindspore-sync": "rank_0/Net/0/7",
}
PAIRS = [
    (layout, file_format)
    for layout in FOLDERS
    for file_format in ("npy", "bin")
    if LAYOUTS[layout].shares_timestamps or file_format == "npy"
]
NESTED = [
    ("Default/a/Block-op0", IN, 0, np.ones((2, 3), dtype=np.float32)),
    ("Default/a/fc/Dense-op0", IN, 0, np.ones((2, 3), dtype=np.float32)),
    ("Default/a/fc/Dense-op0", IN, 2, np.arange(20_000, dtype=np.int64)),
    ("Default/a/fc/Dense-op0", OUT, 0, np.zeros((1, 2, 3, 4), dtype=np.float16)),
    ("Default/a/Block-op0", OUT, 1, np.random.default_rng(4).random(20_000)),
    ("Default/a/Block-op0", OUT, 0, np.array(7, dtype=np.uint8)),
]
CONTENT = ContentSettings("statistic", ("count", "max"), tables="operator")


def output_of(layout: str, file_format: str = "npy", **fields) -> dict[str, str]:
    return {"layout": layout, "file_format": file_format, "started": STARTED, **fields}


def nested(frames, iteration: int = 7, first: int = 1, ids: int = 65535) -> list[agent_pb2.Frame]:
    """Return the inputs of an outer operator, all tensors of an inner one, the outer one's outputs,
    and the iteration's end.
    """
    stamps = {"Default/a/Block-op0": STAMP + first, "Default/a/fc/Dense-op0": STAMP + first + 1}
    records = [
        frames.record(
            sequence,
            array,
            iteration=iteration,
            op_name=name,
            op_type="Op",
            side=side,
            slot=slot,
            timestamp_us=stamps[name],
            task=ids,
            stream=ids,
        )
        for sequence, (name, side, slot, array) in enumerate(NESTED, start=first)
    ]
    return [*records, frames.end(first + len(records), iteration, len(records))]


def manifest(root: Path, iteration: int = 7) -> Manifest:
    (path,) = (root / "rank_0/.dump_metadata/manifest").glob(f"iteration_{iteration}.*.json")
    return Manifest.from_json(path.read_bytes())


def read(root: Path, path: str, member: str) -> np.ndarray:
    """Return the elements of a tensor of a manifest."""
    if ".npy" in path:
        data = select_codec(path).decode((root / path).read_bytes(), limit_bytes=1 << 30)
        return npy_array(memoryview(data))
    found = bin_file.open_bin_file(root / path)
    side, _, slot = member.partition(".")
    (payload,) = [p for p in found.payloads if (p.kind, p.index) == (side, int(slot))]
    part = payload.part
    assert isinstance(part, OpInput | OpOutput)
    assert part.shape
    dtype = DATA_TYPES[part.data_type].element
    return np.frombuffer(found.read_payload(payload), dtype).reshape(part.shape.dim)


def tensors(root: Path) -> list[Path]:
    beside = (".dump_metadata", ".rankdump", "execution_order", "graphs")
    return sorted(
        path
        for path in root.rglob("*")
        if path.is_file() and not any(part in beside for part in path.parts)
    )


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize(("layout", "file_format"), PAIRS)
def test_nested_operators_are_placed_by_the_layout(
    make_agent, make_rank, frames, layout, file_format, codec
):
    """Every tensor has the place that the layout gives it, is in the manifest, and can be read."""
    ids = LAYOUTS[layout].unknown_id
    rank = make_rank(make_agent().address, codec=codec, output=output_of(layout, file_format))
    rank.open()
    sent = nested(frames, ids=ids)
    assert rank.push().send(*sent, frames.goodbye(8)).finish() is grpc.StatusCode.OK
    found = manifest(rank.root)
    assert {str(Path(record.path).parent) for record in found.records} == {FOLDERS[layout]}
    for record, (name, side, slot, array) in zip(found.records, NESTED, strict=True):
        word = f"{'input' if side == IN else 'output'}.{slot}"
        assert record.op_name == name
        assert record.member == (word if LAYOUTS[layout].shares_timestamps else "")
        back = read(rank.root, record.path, word)
        assert (back.dtype, back.shape) == (array.dtype, array.shape)
        assert np.array_equal(back, array)
    paths = {record.path for record in found.records}
    assert {str(path.relative_to(rank.root)) for path in tensors(rank.root)} == paths
    assert len(paths) == (2 if file_format == "bin" else 6)
    sizes = sum((rank.root / path).stat().st_size for path in paths)
    assert sizes == sum(record.bytes_stored for record in found.records)
    assert sizes == found.status.bytes_stored == rank.status().iterations[0].bytes_stored
    assert found.status.is_balanced
    assert rank.status().findings == []


def test_file_names_follow_cann(make_agent, make_rank, frames):
    """Unknown ids are 65535, and formats follow the shape, as in CANN's own names."""
    rank = make_rank(make_agent().address, codec="none", output=output_of("cann-op"))
    rank.open()
    rank.push().send(*nested(frames)).finish()
    names = {path.name for path in tensors(rank.root)}
    inner = f"Op.Default_a_fc_Dense-op0.65535.65535.{STAMP + 2}"
    assert {f"{inner}.output.0.NCHW.npy", f"{inner}.input.2.ND.npy"} <= names


def test_bfloat16_is_stored_in_two_bytes(make_agent, make_rank, frames):
    """A bin file has the elements as the framework had them."""
    rank = make_rank(make_agent().address, output=output_of("cann", "bin"))
    rank.open()
    raw = np.array([0x3F80, 0x4000], dtype=np.uint16)
    sent = frames.record(1, raw, dtype="bfloat16", byte_count=4, side=IN)
    rank.push().send(sent, frames.end(2, 0, 1)).finish()
    (path,) = tensors(rank.root)
    found = bin_file.open_bin_file(path)
    (part,) = found.header.input
    assert (DATA_TYPES[part.data_type].name, part.size) == ("BF16", 4)
    assert bytes(found.read_payload(found.payloads[0])) == raw.tobytes()


def test_model_has_its_own_folder(make_agent, make_rank, frames):
    """If the plan names no model, the kind of a tensor names it."""
    rank = make_rank(make_agent().address, output=output_of("cann", net_name=""))
    rank.open()
    array = np.ones(3, dtype=np.float32)
    sent = [frames.record(n, array, graph=n, model=f"Net{n}" if n < 3 else "") for n in range(1, 4)]
    rank.push().send(*sent, frames.end(4, 0, 3)).finish()
    folders = [str(path.parent.relative_to(rank.root)) for path in tensors(rank.root)]
    assert folders == [f"{STARTED}/0/{name}/0" for name in ("Net/3", "Net1/1", "Net2/2")]


def test_slot_too_high_for_a_header_is_dropped(make_agent, make_rank, frames):
    """A header describes every slot, so slot 10**9 is dropped and counted, without an
    allocation.
    """
    rank = make_rank(make_agent().address, output=output_of("cann", "bin"))
    rank.open()
    array = np.ones(3, dtype=np.float32)
    sent = [frames.record(n, array, slot=slot) for n, slot in ((1, 10**9), (2, 300))]
    rank.push().send(*sent, frames.end(3, 0, 2)).finish()
    (status,) = rank.status().iterations
    assert (status.stored, dict(status.dropped)) == (1, {"slot_too_high": 1})


def test_long_names_are_mapped(make_agent, make_rank, frames):
    """mapping.csv has each name of more than 255 bytes, that of the joined file as well."""
    rank = make_rank(make_agent().address, output=output_of("cann", "bin"))
    rank.open()
    array = np.ones(3, dtype=np.float32)
    name = "Default/" + "x" * 300
    sent = [frames.record(n, array, op_name=name, slot=n, timestamp_us=STAMP) for n in (1, 2)]
    rank.push().send(*sent, frames.end(3, 0, 2)).finish()
    mapping, path = sorted(tensors(rank.root), key=lambda path: path.name != "mapping.csv")
    full = dict(csv.reader(mapping.read_text().splitlines()))[path.name]
    assert full == f"MatMul.Default_{'x' * 300}.0.0.{STAMP}.zst"
    found = manifest(rank.root, 0).records
    assert [read(rank.root, each.path, each.member).tolist() for each in found] == [[1] * 3] * 2


def test_contradictory_plans_are_rejected(make_agent, make_rank):
    """The error names the contradiction; nothing is written."""
    agent = make_agent()
    for number, (output, content, says) in enumerate(
        [
            ({"file_format": "bin"}, ContentSettings(), "layout 'mindspore-sync' has no bin files"),
            ({}, CONTENT, "layout 'mindspore-sync' has no tables of operators"),
            (output_of("cann", "bin"), ContentSettings("full"), "with saved_data 'full'"),
            (
                output_of("cann"),
                ContentSettings("full", tables="operator"),
                "with saved_data 'full'",
            ),
            ({"layout": "cann"}, ContentSettings(), "needs the start time"),
        ]
    ):
        rank = make_rank(agent.address, output=output, content=content, session_id=f"s{number}")
        with pytest.raises(grpc.RpcError, match=says):
            rank.open()


class TestOperatorTables:
    """Statistics in place of files, or beside them for tensors without space."""

    ROW = (np.ones((2, 3), dtype=np.float32), "6,1")

    def rank(self, make_agent, make_rank, **fields):
        rank = make_rank(make_agent().address, **fields)
        rank.open()
        return rank

    def rows(self, frames, sequence: int, stamp: int, iteration: int, **fields):
        return frames.figures(
            sequence, [self.ROW], stamps=[stamp], iteration=iteration, side=OUT, **fields
        )

    def sent(self, frames, **fields) -> list[agent_pb2.Frame]:
        """Return rows of an outer operator around those of an inner one, and the end of the
        iteration.
        """
        outer, inner = fields | {"op_name": "Default/a"}, fields | {"op_name": "Default/a/b"}
        first = frames.figures(1, [self.ROW], stamps=[STAMP], side=IN, **outer)
        second = frames.figures(2, [self.ROW] * 2, stamps=[STAMP + 1] * 2, **inner)
        third = frames.figures(3, [self.ROW], stamps=[STAMP], side=OUT, slot=1, **outer)
        return [first, second, third, frames.end(4, 0, 4)]

    @pytest.mark.parametrize("layout", ["cann", "cann-op-step"])
    def test_each_operator_has_a_table(self, make_agent, make_rank, frames, layout):
        """The table has the name of the operator's file, CANN's columns, and all rows in order."""
        rank = self.rank(make_agent, make_rank, content=CONTENT, output=output_of(layout))
        assert rank.push().send(*self.sent(frames)).finish() is grpc.StatusCode.OK
        outer, inner = tensors(rank.root)
        assert outer.name == f"MatMul.Default_a.65535.65535.{STAMP}.csv"
        assert outer.read_text().splitlines() == [
            "Input/Output,Index,Data Size,Data Type,Format,Shape,Count,Max Value",
            "Input,0,24,DT_FLOAT,ND,2x3,6,1",
            "Output,1,24,DT_FLOAT,ND,2x3,6,1",
        ]
        assert inner.name == f"MatMul.Default_a_b.65535.65535.{STAMP + 1}.csv"
        members = [record.member for record in manifest(rank.root, 0).records]
        assert members == ["input.0", "output.0", "output.0", "output.1"]

    def test_degraded_tensor_has_a_table_beside_the_file(self, make_agent, make_rank, frames):
        """The statistics of a tensor without space are in a table beside the operator's file."""
        content = ContentSettings("tensor", ("count", "max"), tables="operator")
        delivery = DeliverySettings(on_full="statistic")
        rank = self.rank(
            make_agent,
            make_rank,
            content=content,
            delivery=delivery,
            output=output_of("cann", "bin"),
        )
        array, text = self.ROW
        sent = [
            frames.record(1, array, side=IN, timestamp_us=STAMP, task=65535, stream=65535),
            frames.figures(2, [(array, text)], stamps=[STAMP], degraded="buffer_full"),
            frames.end(3, 0, 2),
        ]
        assert rank.push().send(*sent).finish() is grpc.StatusCode.OK
        file, table = sorted(tensors(rank.root), key=lambda path: path.suffix != ".zst")
        assert table.name == f"{file.name.removesuffix('.zst')}.csv"
        operator = parse_file_name(table.name)
        assert operator is not None
        (row,) = statistic_tables.parse_operator_table(table.read_text(), operator, file="t")
        assert dict(row.values) == {"Count": "6", "Max Value": "1"}

    def test_unknown_ids_in_folder_tables_are_65535(self, make_agent, make_rank, frames):
        """Unknown ids are 65535 in the tables of MindSpore's asynchronous tree, too."""
        content = ContentSettings("statistic", ("count", "max"))
        output = output_of("mindspore-async")
        rank = self.rank(make_agent, make_rank, content=content, output=output)
        rank.push().send(*self.sent(frames)).finish()
        (table,) = tensors(rank.root)
        rows = statistic_tables.parse_statistic_table(table.read_text(), file="t")
        assert [(row.task, row.stream) for row in rows] == [(65535, 65535)] * 4

    def test_killed_agent_writes_each_row_once(self, make_daemon, make_rank, frames):
        """Each row is in the table of its operator once, whatever was resent."""
        daemon = make_daemon()
        rank = make_rank(daemon.address, content=CONTENT, output=output_of("cann"))
        rank.open()
        sent = [
            frames.figures(n, [self.ROW], iteration=n, stamps=[STAMP + n], slot=1)
            for n in range(1, 41)
        ]
        stream = rank.push().send(*sent)
        stream.wait_acknowledged(10)
        daemon.kill()
        stream.wait_over()
        daemon.start()
        rank.open()
        ends = [frames.end(40 + n, n, 1) for n in range(1, 41)]
        assert rank.push().send(*sent, *ends).finish() is grpc.StatusCode.OK
        tables = [path.read_text() for path in tensors(rank.root)]
        assert [text.count("\n") for text in tables] == [2] * 40


class TestOperatorJoin:
    """The join at the end of an iteration, with faults."""

    OUTPUT = output_of("cann", "bin")

    @pytest.fixture
    def failing(self, monkeypatch):
        """Lets the disks of all trees fail with the errors of the list."""
        failing: list[int] = []

        def write(descriptor: int, parts) -> None:
            # Of all files only a bin file begins with its header's length.
            if failing and len(parts) == 1 and bytes(parts[0])[1:8] == bytes(7):
                write_parts(descriptor, [bytes(parts[0])[:3]])
                raise OSError(failing[0], os.strerror(failing[0]))
            write_parts(descriptor, parts)

        real = session_storage.DumpTree
        monkeypatch.setattr(
            session_storage, "DumpTree", lambda root, **f: real(root, **f, write=write)
        )
        return failing

    def push(self, rank, sent: list[agent_pb2.Frame]):
        stream = rank.push()
        for first in range(0, len(sent), 7):
            stream.send(*sent[first : first + 7])
        return stream

    def test_join_waits_for_a_full_disk(self, make_agent, make_rank, frames, failing, monkeypatch):
        """Operators and manifest wait until there is space; nothing is stored twice then."""
        monkeypatch.setattr(post_commit, "FIRST_RETRY_S", 0.01)
        monkeypatch.setattr(committer, "CHECK_INTERVAL_S", 0.01)
        rank = make_rank(make_agent().address, codec="none", output=self.OUTPUT)
        rank.open()
        *records, end = nested(frames)
        stream = rank.push().send(*records)
        stream.wait_acknowledged(6)
        failing.append(errno.ENOSPC)
        stream.send(end).finish()
        wait_until(lambda: rank.status().findings)
        (finding,) = rank.status().findings
        assert finding.startswith("rank 0, iteration 7: operators not joined: No space left")
        assert len(tensors(rank.root)) == 6
        failing.clear()
        wait_until(lambda: not rank.status().findings)
        found = manifest(rank.root)
        assert len({each.path for each in found.records}) == len(tensors(rank.root)) < 6
        sizes = sum(path.stat().st_size for path in tensors(rank.root))
        assert sizes == rank.status().iterations[0].bytes_stored

    def test_failed_join_leaves_single_files(self, make_agent, make_rank, frames, failing, caplog):
        """Tensors keep files of their own, which the manifest names; the failure is
        reported once.
        """
        rank = make_rank(make_agent().address, codec="none", output=self.OUTPUT)
        rank.open()
        *records, end = nested(frames)
        stream = rank.push().send(*records)
        stream.wait_acknowledged(6)
        failing.append(errno.EACCES)
        stream.send(end).finish()
        (finding,) = rank.status().findings
        assert finding == "rank 0, tensors stay in files of their own: Permission denied"
        said = [record for record in caplog.records if record.name == iteration_end.__name__]
        assert len(said) == 1
        found = manifest(rank.root).records
        assert len({each.path for each in found}) == 6
        for record, (_, _, _, array) in zip(found, NESTED, strict=True):
            assert np.array_equal(read(rank.root, record.path, record.member), array)
        assert len(tensors(rank.root)) == 6
        sizes = sum(path.stat().st_size for path in tensors(rank.root))
        assert sizes == rank.status().iterations[0].bytes_stored

    def test_iteration_that_ends_twice_joins_later_tensors(self, make_agent, make_rank, frames):
        """Later tensors are joined in the same way; joined ones stay joined."""
        rank = make_rank(make_agent().address, output=self.OUTPUT)
        rank.open()
        assert rank.push().send(*nested(frames), *nested(frames, first=8)).finish()
        found = manifest(rank.root)
        assert found.status.expected == found.status.stored == 12
        assert len({each.path for each in found.records}) == 4 == len(tensors(rank.root))
        assert found.status.bytes_stored == sum(p.stat().st_size for p in tensors(rank.root))

    def test_late_tensor_gets_its_own_file(self, make_agent, make_rank, frames):
        """The manifest names its file when the iteration ends again."""
        rank = make_rank(make_agent().address, output=self.OUTPUT)
        rank.open()
        late = frames.record(
            8,
            NESTED[0][3],
            iteration=7,
            op_name=NESTED[0][0],
            op_type="Op",
            side=IN,
            slot=1,
            timestamp_us=STAMP + 1,
            task=65535,
            stream=65535,
        )
        stream = rank.push().send(*nested(frames))
        stream.wait_acknowledged(7)
        stream.send(late, frames.end(9, 7, 1)).finish()
        found = manifest(rank.root).records
        assert len(found) == 7
        assert found[-1].path.endswith(f".{STAMP + 1}.input.1.zst")
        assert np.array_equal(read(rank.root, found[-1].path, "input.1"), NESTED[0][3])
        assert len(tensors(rank.root)) == 3

    def test_dead_rank_leaves_single_files(self, make_agent, make_rank, frames):
        """Each tensor that the rank sent can be read from a file of its own."""
        rank = make_rank(make_agent().address, output=self.OUTPUT)
        rank.open()
        stream = rank.push().send(*nested(frames)[:4])
        stream.wait_acknowledged(4)
        stream.cut()
        assert len(tensors(rank.root)) == 4
        assert all(bin_file.open_bin_file(path).payloads for path in tensors(rank.root))

    @pytest.mark.parametrize("moment", ["join", "joined", "remove", "removed"])
    @pytest.mark.parametrize("codec", ["none", "zstd"])
    def test_interrupted_join_is_repeated_without_loss(
        self, make_agent, make_rank, frames, monkeypatch, moment, codec
    ):
        """The repetition has the same result: no tensor is lost or duplicated."""
        agent = make_agent()
        rank = make_rank(agent.address, codec=codec, output=self.OUTPUT)
        rank.open()
        room, step = {
            "join": (DumpTree, "join"),
            "joined": (AgentLedger, "mark_joined"),
            "remove": (DumpTree, "remove"),
            "removed": (AgentLedger, "enter_iteration_end"),
        }[moment]
        real, reached = getattr(room, step), threading.Event()

        def end_within(itself, first, *rest, **fields) -> None:
            reached.set()
            if moment == "remove":
                real(itself, list(first)[:2])
            raise RuntimeError("ending on purpose")

        with monkeypatch.context() as patch:
            patch.setattr(room, step, end_within)
            stream = rank.push().send(*nested(frames))
            assert reached.wait(WAIT_S)
            agent.stop()
            stream.wait_over()
        agent.start()
        found = manifest(rank.root)
        assert found.status.is_balanced
        paths = {record.path for record in found.records}
        assert {str(path.relative_to(rank.root)) for path in tensors(rank.root)} == paths
        assert len(paths) == 2
        for record, (_, _, _, array) in zip(found.records, NESTED, strict=True):
            assert np.array_equal(read(rank.root, record.path, record.member), array)
        sizes = sum(path.stat().st_size for path in tensors(rank.root))
        assert sizes == found.status.bytes_stored

    @pytest.mark.parametrize(("seed", "codec"), [(0, "none"), (1, "zstd"), (2, "zstd")])
    def test_agent_killed_at_any_moment_stores_each_tensor_once(
        self, make_daemon, make_rank, frames, seed, codec
    ):
        """After any number of kills every tensor is in the tree once, and can be read."""
        chance = random.Random(seed)
        daemon = make_daemon()
        rank = make_rank(daemon.address, codec=codec, output=self.OUTPUT)
        sent = list(itertools.chain.from_iterable(nested(frames, n, 7 * n + 1) for n in range(30)))
        for moment in sorted(chance.sample(range(20, 200), 2)):
            acknowledged = rank.open().acknowledged_sequence
            stream = self.push(rank, sent[acknowledged:])
            stream.wait_acknowledged(max(moment, acknowledged))
            daemon.kill()
            stream.wait_over()
            daemon.start()
        acknowledged = rank.open().acknowledged_sequence
        assert self.push(rank, sent[acknowledged:]).finish() is grpc.StatusCode.OK
        named: Counter[tuple[str, str]] = Counter()
        for iteration in range(30):
            found = manifest(rank.root, iteration)
            assert found.status.is_balanced
            assert found.status.bytes_stored == sum(r.bytes_stored for r in found.records)
            for record, (_, _, _, array) in zip(found.records, NESTED, strict=True):
                named[record.path, record.member] += 1
                assert np.array_equal(read(rank.root, record.path, record.member), array)
        assert set(named.values()) == {1}
        assert {rank.root / path for path, _ in named} == set(tensors(rank.root))
        assert not list(rank.root.rglob(".*.tmp"))


def test_long_join_delays_no_other_rank(make_agent, make_rank, frames, monkeypatch):
    """All other ranks continue, and the session of this one does not end before its manifest."""
    may_end = threading.Event()
    go_on = iteration_end.IterationJoin.join_some
    monkeypatch.setattr(
        iteration_end.IterationJoin,
        "join_some",
        lambda self: go_on(self) if may_end.is_set() or self.end.iteration != 7 else False,
    )
    agent = make_agent()
    slow, other = (
        make_rank(
            agent.address, rank=n, world_size=2, session_id=f"s{n}", output=output_of("cann", "bin")
        )
        for n in (0, 1)
    )
    for rank in (slow, other):
        rank.open()
    stream = slow.push()
    stream.send(*nested(frames), *nested(frames, iteration=8, first=8), frames.goodbye(15))
    stream.wait_acknowledged(14)
    assert not list(slow.root.rglob("iteration_7.*"))
    done = other.push().send(*nested(frames, iteration=9), frames.goodbye(8)).finish()
    assert done is grpc.StatusCode.OK
    assert list((slow.root / "rank_1").rglob("iteration_9.*"))
    assert stream.acknowledged == 14
    may_end.set()
    assert stream.finish() is grpc.StatusCode.OK
    for iteration in (7, 8):
        found = manifest(slow.root, iteration)
        assert found.status.is_balanced
        assert len({record.path for record in found.records}) == 2


def test_ranks_that_end_together_have_their_own_files(make_agent, make_rank, frames):
    """Ranks whose iterations end at the same time have a file each."""
    agent = make_agent()
    ranks = [
        make_rank(
            agent.address,
            rank=n,
            world_size=4,
            session_id=f"session{n}",
            output=output_of("cann", "bin"),
        )
        for n in range(4)
    ]

    def dump(rank) -> None:
        rank.open()
        frames_of = itertools.chain.from_iterable(nested(frames, n, 7 * n + 1) for n in range(5))
        rank.push().send(*frames_of).finish()

    threads = [threading.Thread(target=dump, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = tensors(ranks[0].root)
    assert len(found) == 4 * 5 * 2
    assert {path.parts[-5] for path in found} == set("0123")
    assert all(bin_file.open_bin_file(path).payloads for path in found)
