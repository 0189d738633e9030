"""`rankdump.open`: a tree as an object, in every profile and by either codec."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from support.tensor_layouts import shard_rows
from support.tree_builder import TreeBuilder

from rankdump import reader
from rankdump._core.record import TensorKey, TensorSide
from rankdump._layout.profile import PROFILES
from rankdump.errors import ConfigError, CorruptedError, UnsupportedError

CONV = "Default/network-Net/conv1-Conv2d/Conv2d-op0"
LINEAR = "Default/network-Net/fc-Linear/Linear-op0"
GRADIENT = f"Gradients/{LINEAR}"
IR = f"""# IR entry: @kernel_graph0
%para1_x: <Tensor[Float32], (2, 3)>
subgraph @kernel_graph0() {{
  %0(conv) = Conv2d(%para1_x) {{stride: (1, 1)}}
      : (<Tensor[Float32], (2, 3)>) -> (<Tensor[Float32], (2, 3)>)
      # Fullname with scope: ({CONV})
      # In file /job/train.py:40/    loss = net(x)/
      # In file /job/model.py:7/        return self.fc(self.conv1(x))/
}}
"""


def grown(root: Path, profile: str = "ms2.3", codec: str = "zstd") -> TreeBuilder:
    """Two ranks, two iterations, three operators, one constant."""
    tree = TreeBuilder(root / "tree", PROFILES[profile])
    for rank in (0, 1):
        tree.graph(rank, IR)
        for iteration in (0, 3):
            seed = rank * 10 + iteration
            for at, name in enumerate((CONV, LINEAR, GRADIENT)):
                array = np.full((2, 3), seed + at, np.float32)
                tree.tensor(rank, iteration, name, array, side=TensorSide.INPUT, codec=codec)
                tree.tensor(rank, iteration, name, -array, codec=codec)
            if iteration == 0:
                tree.tensor(rank, 0, "mask", np.eye(2), op_type="Parameter", constant=True)
            tree.complete(rank, iteration)
    return tree


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("profile", PROFILES)
def test_dump_has_raw_names_and_arrays(tmp_path, profile, codec):
    """Names are the raw ones in every profile, and every array is the one that went in."""
    dump = reader.open(grown(tmp_path, profile, codec).root)
    assert (dump.ranks, dump.graphs, dump.iterations) == ((0, 1), (0,), (0, 3))
    assert dump.operators == ("mask", CONV, LINEAR, GRADIENT)
    assert [dump.load(entry).tolist() for entry in dump.constants] == [np.eye(2).tolist()] * 2
    (entry,) = dump.tensors(rank=1, iteration=3, operator=LINEAR, side="output")
    assert (dump.load(entry) == -14.0).all()
    assert dump.problems == ()


@pytest.mark.parametrize(
    ("filters", "count"),
    [
        ({}, 26),
        ({"rank": 1}, 13),
        ({"rank": 7}, 0),
        ({"graph": 0}, 26),
        ({"graph": 1}, 0),
        ({"iteration": 3}, 12),
        ({"iteration": "0|2-3"}, 24),
        ({"operator": "*fc*"}, 16),
        ({"operator": "Linear"}, 16),
        ({"operator": "linear"}, 0),
        ({"operator": "fc/Linear-op*"}, 8),
        ({"operator": "Gradients/fc/*"}, 8),
        ({"operator": re.compile(r"^Default/.*Linear-op\d+$")}, 8),
        ({"op_type": "Conv*"}, 8),
        ({"op_type": "Parameter"}, 2),
        ({"side": "input", "rank": 0, "iteration": 0}, 3),
    ],
)
def test_dump_filters_combine(tmp_path, filters, count):
    """Every filter narrows, and they narrow together; constants belong to no iteration."""
    dump = reader.open(grown(tmp_path).root)
    assert len(dump.tensors(**filters)) == count
    assert len(dump.where(**filters).tensors()) == count


def test_where_narrows_every_property(tmp_path):
    """A part of a dump is a dump; parts of parts are smaller still."""
    dump = reader.open(grown(tmp_path).root).where(rank=1)
    assert dump.ranks == (1,)
    assert dump.where(iteration=3).iterations == (3,)
    assert dump.where(operator="*conv1*").operators == (CONV,)
    assert dump.where(rank=0).ranks == ()
    assert len(dump.constants) == 1


@pytest.mark.parametrize(
    "filters",
    [
        {"iteration": "0, 2"},
        {"iteration": [0, 2]},
        {"iteration": "3-1"},
        {"iteration": "0|1-"},
        {"iteration": "-1"},
        {"side": "left"},
        {"rank": "0"},
        {"operator": 3},
        {"iterations": "0"},
    ],
)
def test_invalid_filter_names_the_allowed_values(tmp_path, filters):
    """The error names the filter, the value and the legal ones."""
    with pytest.raises(ConfigError, match="allowed:"):
        reader.open(grown(tmp_path).root).tensors(**filters)


def test_filters_accept_numpy_numbers(tmp_path):
    """A script loops over arrays as well as over lists."""
    dump = reader.open(grown(tmp_path).root)
    rank, iteration = np.array([1, dump.iterations[0]])
    found = dump.tensors(rank=rank, iteration=iteration)
    assert found == dump.tensors(rank=1, iteration=dump.iterations[0]) != []


@pytest.mark.parametrize("profile", PROFILES)
def test_load_accepts_keys_with_raw_names(tmp_path, profile):
    """A key may have the operator's raw name, whatever the files are called."""
    dump = reader.open(grown(tmp_path, profile).root)
    raw = TensorKey(1, "Net", 0, 3, 0, "Linear", LINEAR, TensorSide.INPUT, 0)
    if profile == "ms2.0":
        # Two operators share the last component here; in a real tree names are unique.
        raw = raw._replace(op_type="Conv2d", op_name=CONV)
    expected = 13.0 if profile == "ms2.0" else 14.0
    assert (dump.load(raw) == expected).all()
    with pytest.raises(CorruptedError, match=r"no tensor input 9 of .* in rank 1, graph 0"):
        dump.load(raw._replace(slot=9))


def test_load_by_key_takes_the_last_run(tmp_path):
    """A second run in the same tree adds files; a key means the newest, its stamp an exact one."""
    tree = grown(tmp_path)
    tree.tensor(0, 0, CONV, np.full((2, 3), 99, np.float32), side=TensorSide.INPUT)
    dump = reader.open(tree.root)
    old, new = dump.tensors(rank=0, iteration=0, operator=CONV, side="input")
    assert (dump.load(old.key._replace(timestamp_us=0)) == 99).all()
    assert (dump.load(old.key) == 0).all()
    assert (dump.load(new.key) == 99).all()


def test_statistics_rows_have_raw_names(tmp_path):
    """Rows of the tables come with raw names, filtered like tensors."""
    tree = TreeBuilder(tmp_path)
    tree.row(0, 1, CONV, np.array([3.0, -4.0], np.float32))
    tree.row(0, 2, LINEAR, np.array([1], np.int32), side=TensorSide.INPUT, slot=2)
    for iteration in (1, 2):
        tree.complete(0, iteration, world_size=1)
    dump = reader.open(tmp_path)
    (row,) = dump.statistics(operator=CONV)
    assert (row.op_name, row.op_type, row.key.iteration) == (CONV, "Conv2d", 1)
    assert dict(row.values) == {"Max Value": "3", "Min Value": "-4", "L2Norm Value": "5"}
    assert [r.key.slot for r in dump.statistics(side="input")] == [2]
    assert dump.statistics(iteration=7) == []
    assert (dump.operators, dump.iterations, dump.tensors()) == ((CONV, LINEAR), (1, 2), [])


def test_sources_have_the_recorded_stacks(tmp_path):
    """Outermost line first, by the operator's full name."""
    frames = reader.open(grown(tmp_path).root).sources[CONV]
    assert [(frame.file, frame.line, frame.code) for frame in frames] == [
        ("/job/train.py", 40, "loss = net(x)"),
        ("/job/model.py", 7, "return self.fc(self.conv1(x))"),
    ]


def test_open_of_another_folder_is_an_error_in_one_line(tmp_path):
    """The path, what was expected, and the folder that was probably meant."""
    with pytest.raises(CorruptedError, match="no such folder; expected one that contains rank_0"):
        reader.open(tmp_path / "nowhere")
    (tmp_path / "train.py").write_text("import rankdump")
    with pytest.raises(CorruptedError, match=r"train.py: is not a dump: expected a folder that"):
        reader.open(tmp_path / "train.py")
    with pytest.raises(CorruptedError, match="not a dump tree: no folder rank_0"):
        reader.open(tmp_path)
    root = grown(tmp_path).root
    with pytest.raises(CorruptedError, match=f"did you mean {re.escape(str(root))}"):
        reader.open(root / "rank_0")


def sharded(root: Path) -> tuple[TreeBuilder, np.ndarray]:
    """A weight of five rows on two ranks, in two micro-batches of one iteration."""
    tree = TreeBuilder(root / "tree")
    weight = np.arange(15, dtype=np.float32).reshape(5, 3)
    for rank, rows in enumerate((slice(0, 3), slice(3, 5))):
        for iteration in (0, 1):
            tree.tensor(
                rank,
                iteration,
                LINEAR,
                weight[rows] + iteration,
                tensor_layout=shard_rows(rank, rows.start, (5, 3)),
                microbatch=iteration,
                phase="eval",
            )
            tree.tensor(rank, iteration, CONV, weight)
            tree.complete(rank, iteration)
    return tree, weight


def test_load_full_joins_the_shards_of_all_ranks(tmp_path):
    """By entry and by key, whatever rank is selected; a whole tensor is returned as it is."""
    tree, weight = sharded(tmp_path)
    dump = reader.open(tree.root).where(rank=1)
    (shard,) = dump.tensors(iteration=1, operator=LINEAR)
    assert shard.record is not None
    assert (shard.record.layout, shard.record.microbatch, shard.record.phase) == (
        shard_rows(1, 3, (5, 3)),
        1,
        "eval",
    )
    assert dump.load(shard).shape == (2, 3)
    assert dump.load(shard, full=True).tolist() == (weight + 1).tolist()
    assert dump.load(shard.key, full=True).tolist() == (weight + 1).tolist()
    (whole,) = dump.tensors(iteration=1, operator=CONV)
    assert dump.load(whole, full=True).tolist() == weight.tolist()


def test_load_full_names_the_rank_without_a_shard(tmp_path):
    tree, _ = sharded(tmp_path)
    for path in tree.root.glob("rank_0/Net/0/1/*Linear*"):
        path.unlink()
    dump = reader.open(tree.root)
    (shard,) = dump.tensors(rank=1, iteration=1, operator=LINEAR)
    with pytest.raises(CorruptedError, match="output 0: its shards cover 6 of 15 elements; rank 0"):
        dump.load(shard, full=True)


def test_numbers_of_a_dump_of_statistics_need_no_rows(tree, monkeypatch):
    """Ranks, graphs and iterations are in names of folders; a table without rows has none."""
    for rank, iteration in ((0, 1), (0, 2), (3, 2)):
        tree.row(rank, iteration, "Default/a-A/A-op0", np.ones(2, np.float32), graph=rank)
        tree.complete(rank, iteration)
    empty = tree.row(4, 7, "Default/a-A/A-op0", np.ones(2, np.float32), graph=4)
    empty.write_text(empty.read_text().partition("\n")[0] + "\n")
    read: list[str] = []
    monkeypatch.setattr(
        "rankdump._analysis.reader.table_rows.read_table",
        lambda access, folder, name: read.append(folder) or empty.read_bytes(),
    )
    dump = reader.open(tree.root)
    assert (dump.ranks, dump.graphs, dump.iterations) == ((0, 3, 4), (0, 3), (1, 2))
    assert dump.where(iteration="2", graph=3).ranks == (3,)
    assert dump.where(iteration=1).ranks == (0,)
    assert not read
    assert dump.operators == ()
    assert len(read) == 4


def test_npy_file_has_no_format_to_convert(tmp_path):
    dump = reader.open(grown(tmp_path).root)
    with pytest.raises(UnsupportedError, match="an npy file has no device format: it cannot be "):
        dump.load(dump.tensors()[0], format="NCHW")
