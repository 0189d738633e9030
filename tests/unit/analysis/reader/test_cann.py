"""Trees of CANN: every tensor once, from headers, manifests and tables."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cann_trees import STARTED, CannTree, bin_parts, write
from support.tree_builder import TreeBuilder

from rankdump import reader
from rankdump._analysis.fsck.tree_check import check_tree
from rankdump._binfile.bin_file import serialize_bin_head
from rankdump._binfile.header_parts import DumpData, OpInput, OpOutput, Shape
from rankdump._core import npy_format
from rankdump._core.manifest import Manifest
from rankdump._core.record import TensorKey, TensorSide
from rankdump._layout.tree_layouts import LAYOUTS as KNOWN
from rankdump.errors import CorruptedError, UnsupportedError
from rankdump.reader import Query, Survey, damaged, findings, load, locate, status, walk

NAME = "Default/network-Net/fc.1/Add-op0"
FLAT = "Default_network-Net_fc_1_Add-op0"
ONES = np.ones((2, 3), np.float32)
HALF = np.arange(4, dtype=np.float16)
CANN_OP = KNOWN["cann-op"]
LAYOUTS = ["mindspore-async", "cann", "cann-step", "cann-op", "cann-op-step"]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_members_of_bin_files_are_tensors(tmp_path, layout, complete, packed):
    """One entry each, raw names, gaps passed over; a manifest says rank and iteration."""
    tree = CannTree(tmp_path, layout, device=1, rank=9, packed=packed)
    path = tree.operator(4, NAME, {0: ONES, 2: -ONES}, {1: HALF})
    if complete:
        tree.complete(4)
    found = walk(tmp_path)
    assert (found.problems, found.foreign) == ((), 0)
    assert [entry.member for entry in found.entries] == ["input.0", "input.2", "output.1"]
    assert {entry.path for entry in found.entries} == {path}
    first, second, third = found.entries
    assert (first.op_name, first.op_type, first.key.op_name) == (NAME, "Add", FLAT)
    assert (third.key.side, third.key.slot) == (TensorSide.OUTPUT, 1)
    told = complete or layout == "mindspore-async"
    assert first.key.rank == (9 if told else 1)
    assert first.key.iteration == (4 if complete or layout != "cann-op" else 0)
    np.testing.assert_array_equal(load(second), -ONES)
    np.testing.assert_array_equal(load(third), HALF)
    facts = reader.facts(third)
    assert (facts.dtype, facts.shape, facts.bytes_in) == ("float16", (4,), 8)
    assert sum(entry.taken_bytes for entry in found.entries) == path.stat().st_size
    assert locate(path) == found.entries


@pytest.mark.parametrize("layout", ["mindspore-async", "cann"])
def test_long_names_of_joined_files_are_not_missing(tmp_path, layout):
    """Their rows stay, and until the first iteration is over no manifest says where they went."""
    path = CannTree(tmp_path, layout).operator(0, NAME, {0: ONES}, {})
    short = path.rename(path.with_name("43"))
    rows = f"42,{path.name}.input.0\n43,{path.name}\n"
    short.with_name("mapping.csv").write_text(rows)
    assert (len(walk(tmp_path).entries), walk(tmp_path).problems) == (1, ())
    assert check_tree(tmp_path, workers=1).damages == ()
    short.unlink()
    (problem,) = walk(tmp_path).problems
    assert problem == f"{short.relative_to(tmp_path)}: named by mapping.csv, but missing"
    (damage,) = check_tree(tmp_path, workers=1).damages
    assert damage.path == str(short.relative_to(tmp_path))


def test_headers_are_read_only_without_manifests(tmp_path, monkeypatch):
    """A tree of ours is listed by its manifests: a hundred thousand files are not opened."""
    tree = CannTree(tmp_path)
    tree.operator(0, NAME, {0: ONES}, {0: HALF})
    tree.complete(0)
    monkeypatch.setattr(
        "rankdump._analysis.reader.tree_files.described", lambda path: pytest.fail(str(path))
    )
    assert len(walk(tmp_path).entries) == 2


def test_listing_reads_no_payloads(tmp_path):
    """Memory and time go with headers, whatever the tensors are."""
    tree = CannTree(tmp_path)
    tree.operator(0, NAME, {0: np.zeros(8 << 20, np.uint8)}, {})
    walk(tmp_path)
    tracemalloc.start()
    try:
        assert len(walk(tmp_path).entries) == 1
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("packed", [False, True])
def test_joined_and_single_files_are_listed_once(tmp_path, packed):
    """What an interrupted agent leaves twice is listed once, what it had not joined as it is."""
    tree = CannTree(tmp_path, packed=packed)
    path = tree.operator(0, NAME, {0: ONES}, {0: HALF})
    key = tree.key(0, NAME)._replace(timestamp_us=tree.clock_us - 10)
    tree.single(key, TensorSide.INPUT, 0, ONES)
    tree.single(key, TensorSide.OUTPUT, 0, HALF)
    other = tree.key(0, "Default/Mul-op1")
    lone = tree.single(other, TensorSide.OUTPUT, 2, ONES)
    found = walk(tmp_path)
    assert found.problems == ()
    assert [entry.path for entry in found.entries] == [path, path, lone]
    assert (found.entries[2].member, found.entries[2].op_name) == ("output.2", "Default/Mul-op1")
    np.testing.assert_array_equal(load(found.entries[2]), ONES)
    path.write_bytes(path.read_bytes()[:20])
    found = walk(tmp_path)
    assert len(found.entries) == 3
    assert path not in {entry.path for entry in found.entries}
    assert len(found.problems) == 1


def test_manifests_may_name_single_files(tmp_path):
    """Where joining had no room, each tensor has its own file, and its record with it."""
    tree = CannTree(tmp_path)
    path = tree.operator(0, NAME, {0: ONES}, {})
    key = tree.key(0, NAME)._replace(timestamp_us=tree.clock_us - 10)
    lone = tree.single(key, TensorSide.INPUT, 0, ONES)
    path.unlink()
    relative, size = str(lone.relative_to(tmp_path)), lone.stat().st_size
    tree.records[0] = [tree.records[0][0]._replace(path=relative, bytes_stored=size)]
    tree.complete(0)
    (entry,) = walk(tmp_path).entries
    assert entry.record == tree.records[0][0]
    assert walk(tmp_path).problems == ()


def test_long_names_of_bin_files_are_found(tmp_path):
    """A number on disk, in one row or in many; it may have been packed since."""
    tree = CannTree(tmp_path, packed=False)
    name = "Default/" + "/".join(f"layer{n}-Block" for n in range(60)) + "/MatMul-op1"
    path = tree.operator(0, name, {0: ONES}, {})
    assert path.name.isdecimal()
    (entry,) = walk(tmp_path).entries
    assert entry.op_name == name
    packed = write(
        path.with_name(f"{path.name}.zst"),
        bin_parts(name, entry.key.timestamp_us, {0: ONES}, {}),
    )
    path.unlink()
    (entry,) = walk(tmp_path).entries
    assert (entry.path, entry.key.op_name) == (packed, name.replace("/", "_"))
    np.testing.assert_array_equal(load(entry), ONES)
    moved = tmp_path / "elsewhere"
    shutil.copytree(tmp_path / STARTED, moved / STARTED)
    assert [each.key for each in walk(moved).entries] == [entry.key]


def test_trees_of_all_tools_below_one_root(tmp_path):
    """MindSpore's beside CANN's: models, single operators, captured streams, exceptions."""
    sync = TreeBuilder(tmp_path)
    sync.tensor(0, 2, NAME, ONES)
    CannTree(tmp_path, "cann", device=3).operator(5, NAME, {0: ONES}, {})
    CannTree(tmp_path, "cann-op-step", device=3).operator(6, NAME, {0: ONES}, {})
    stamp = 1_700_000_000_000_500
    parts = bin_parts("net/Add", stamp, {0: ONES}, {})
    for relative in (
        f"3/Add.net_Add.8.1.2.{stamp}",
        "extra-info/data-dump/3/exception_info.1.2.20261121175901123",
        f"{STARTED}/3/9/ReduceSum.net_Add.1.2.{stamp}",
        f"{STARTED}/3/aclnnAdd.Add_1.1.2.{stamp}.zst",
        f"{STARTED}/3/Opdebug.Node_OpDebug.1.2.{stamp}",
        f"{STARTED}/3/Opdebug.Node_OpDebug.1.2.{stamp}.output.0.json",
    ):
        write(tmp_path / relative, parts)
    (tmp_path / STARTED / "3" / "readme.txt").write_text("x")
    found = walk(tmp_path)
    assert (found.ranks, found.problems, found.foreign) == ((0,), (), 1)
    where = {(e.key.op_type, e.key.rank, e.key.iteration, e.key.net_name) for e in found.entries}
    assert where == {
        ("Add", 0, 2, "Net"),
        ("Add", 3, 5, "Net"),
        ("Add", 3, 6, ""),
        ("Add", 3, 8, ""),
        ("exception_info", 3, 0, ""),
        ("ReduceSum", 3, 9, ""),
        ("Add_1", 3, 0, ""),
    }
    for entry in found.entries:
        np.testing.assert_array_equal(load(entry), ONES)
        assert locate(entry.path) == (entry,)


def test_devices_are_ranks_in_a_tree_without_ranks(tmp_path):
    """And are called what they are; a device without tensors is said."""
    for device in (0, 1):
        CannTree(tmp_path, device=device).operator(0, NAME, {0: ONES}, {})
    CannTree(tmp_path, device=1).operator(1, NAME, {0: ONES}, {})
    (tmp_path / STARTED / "2").mkdir()
    found = walk(tmp_path)
    assert (found.ranks, found.unit) == ((0, 1, 2), "device")
    said = findings(found)
    assert "device 0: iteration 1 is missing, other devices have it" in said
    assert "device 2: the folder has no tensors" in said
    assert not any("rank" in each for each in said)
    assert repr(reader.open(tmp_path)).endswith("3 tensors of 3 devices>")
    assert len(status(tmp_path).iterations) == 3


def test_devices_of_two_hosts_get_ranks_from_manifests(tmp_path):
    """Each rank is told by its manifest, and by the folder where a file has none."""
    for rank, started in ((0, STARTED), (8, "20261121175907")):
        tree = CannTree(tmp_path / str(rank), device=0, rank=rank)
        tree.operator(0, NAME, {0: ONES}, {})
        tree.operator(1, NAME, {0: ONES}, {})
        for record in tree.records[0]:
            moved = record._replace(path=record.path.replace(STARTED, started))
            tree.records[0] = [moved]
        tree.complete(0, world_size=16)
        shutil.copytree(tmp_path / str(rank) / STARTED, tmp_path / "all" / started)
        shutil.copytree(tmp_path / str(rank) / f"rank_{rank}", tmp_path / "all" / f"rank_{rank}")
    found = walk(tmp_path / "all")
    assert found.problems == ()
    assert [(entry.key.rank, entry.key.iteration) for entry in found.entries] == [
        (0, 0),
        (0, 1),
        (8, 0),
        (8, 1),
    ]


def test_status_of_a_cann_tree_balances(tmp_path):
    """Manifests of a CANN tree balance as those of any other."""
    tree = CannTree(tmp_path, device=0, rank=3)
    tree.operator(0, NAME, {0: ONES}, {0: HALF})
    tree.complete(0, world_size=4)
    found = walk(tmp_path)
    assert not damaged(found)
    assert findings(found) == ("rank 0-2: no folder, in a job with world size 4",)
    (iteration,) = status(tmp_path).iterations
    assert (iteration.rank, iteration.stored, iteration.complete) == (3, 2, True)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("cut", [0, 5, 9, 40])
def test_truncated_bin_file_is_a_problem(tmp_path, cut, packed):
    """Whatever is left of a bin file, the walk goes on and says so."""
    tree = CannTree(tmp_path, packed=packed)
    path = tree.operator(0, NAME, {0: ONES}, {0: HALF})
    tree.operator(0, NAME, {0: ONES}, {})
    path.write_bytes(path.read_bytes()[:cut])
    found = walk(tmp_path)
    assert len(found.entries) == 1
    (problem,) = found.problems
    assert path.name in problem
    with pytest.raises(CorruptedError, match=path.name):
        locate(path)


def test_truncated_payload_is_found_by_size_or_loading(tmp_path):
    """The header stands; what is behind it does not reach."""
    tree = CannTree(tmp_path, packed=True)
    path = tree.operator(0, NAME, {0: ONES}, {0: HALF})
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    for entry in walk(tmp_path).entries:
        with pytest.raises(CorruptedError, match=path.name):
            load(entry)
    tree.complete(0)
    (problem,) = walk(tmp_path).problems
    assert f"{len(whole) - 3} bytes, but its manifest has {len(whole)}" in problem


@pytest.mark.parametrize("member", ["", "x", "input", "input.-1", "input.0.0", "space.0"])
def test_invalid_member_in_a_manifest_is_a_problem(tmp_path, member):
    """What a record calls a part of a file has to be one."""
    tree = CannTree(tmp_path)
    tree.operator(0, NAME, {0: ONES}, {})
    tree.records[0] = [tree.records[0][0]._replace(member=member)]
    tree.complete(0)
    found = walk(tmp_path)
    assert found.entries == ()
    assert len(found.problems) == 1
    tree.records[0] = [tree.records[0][0]._replace(member="input.7")]
    tree.complete(0)
    (entry,) = walk(tmp_path).entries
    with pytest.raises(CorruptedError, match=r"the file has no tensor input\.7"):
        load(entry)


def test_member_with_another_shape_than_its_manifest_is_damage(tmp_path):
    """A member that was swapped for another does not pass; a scalar is one element."""
    tree = CannTree(tmp_path)
    tree.operator(0, NAME, {0: ONES, 1: np.array(2.5, np.float32)}, {})
    wrong = tree.records[0][0]._replace(shape=(3, 2))
    tree.records[0][0] = wrong
    tree.complete(0)
    first, second = walk(tmp_path).entries
    with pytest.raises(CorruptedError, match=r"\(2, 3\).*\(3, 2\)"):
        load(first)
    assert (load(second).shape, float(load(second))) == ((), 2.5)


def test_strings_are_listed_and_not_loaded(tmp_path):
    """Strings have a header, no array and no figures; they are no damage."""
    text = OpInput(13, 2, Shape((2,)), size=5)
    bytes_8 = OpOutput(0, 2, Shape((4,)), size=4)
    parts = [
        serialize_bin_head(DumpData(op_name="a/b", input=(text,), output=(bytes_8,))),
        b"helloabcd",
    ]
    path = write(tmp_path / STARTED / "0" / "Print.a_b.1.2.1795221576504376", parts)
    first, second = walk(tmp_path).entries
    assert reader.facts(first).dtype == "string"
    with pytest.raises(UnsupportedError, match=path.name):
        load(first)
    assert load(second).tolist() == [97, 98, 99, 100]
    rows = list(Survey(walk(tmp_path), Query()))
    assert [(row.finite, row.damage) for row in rows] == [(None, ""), (True, "")]


def test_type_without_a_number_is_read_by_its_manifest(tmp_path):
    """8-bit floats of which CANN has no kind lie as plain bytes."""
    part = OpInput(0, 2, Shape((1, 2)), size=2)
    parts = [serialize_bin_head(DumpData(op_name=NAME, input=(part,))), bytes([0x40, 0x80])]
    tree = CannTree(tmp_path)
    path = tree.operator(0, NAME, {0: ONES}, {})
    write(path, parts)
    record, size = tree.records[0][0], path.stat().st_size
    kept = record._replace(dtype="float8_e4m3fnuz", shape=(1, 2), bytes_stored=size)
    tree.records[0] = [kept]
    assert load(walk(tmp_path).entries[0]).dtype == np.int8
    tree.complete(0)
    tensor = load(walk(tmp_path).entries[0])
    assert (tensor.shape, tensor.dtype) == ((1, 2), np.float32)
    assert np.isnan(tensor[0, 1])


HEADER = (
    "Input/Output,Index,Data Size,Data Type,Format,Shape,Max Value,Min Value,Avg Value,Count,"
    "Nan Count,Negative Inf Count,Positive Inf Count"
)


def test_tables_of_operators_are_read(tmp_path):
    """Figures in the place of a bin file; cells may be empty or NA."""
    tree = CannTree(tmp_path, device=2)
    lines = [
        HEADER,
        "Input,0,24,DT_FLOAT,ND,2x3,nan,1,nan,6,1,0,2",
        "Output,1,4,DT_BF16,ND,-,3,-3,0,1,0,0,0",
        "Output,2,4,DT_INT4,NC1HWC0,8,,,,NA,NA,NA,NA",
    ]
    tree.table(6, NAME, lines)
    found = walk(tmp_path)
    assert (found.entries, found.foreign, found.problems) == ((), 0, ())
    first, second, third = rows = reader.open(tmp_path).statistics()
    assert [(row.key.rank, row.key.iteration, row.op_type) for row in rows] == [(2, 6, "Add")] * 3
    assert (first.key.op_name, first.dtype, first.shape) == (FLAT, "float32", (2, 3))
    assert (first.number("nan count"), first.finite) == (1, False)
    assert (second.dtype, second.shape, second.number("min"), second.finite) == (
        *("bfloat16", (), -3),
        True,
    )
    assert (third.dtype, third.number("max"), third.finite) == ("int4", None, None)
    surveyed = list(Survey(found, Query()))
    assert [(row.nans, row.infinities) for row in surveyed] == [(1, 2), (0, 0), (None, None)]
    assert reader.open(tmp_path).iterations == (6,)


def test_rows_get_their_iteration_from_the_manifest(tmp_path):
    """Where no folder says it: single operators of many iterations lie in one folder."""
    tree = CannTree(tmp_path, "cann-op", device=2, rank=5)
    for iteration in (3, 4):
        tree.table(
            iteration,
            NAME,
            [
                "Input/Output,Index,Data Size,Data Type,Format,Shape,l2norm",
                "Input,0,24,DT_FLOAT,ND,2x3,2.5",
            ],
        )
        key = tree.key(iteration, NAME)._replace(timestamp_us=tree.clock_us - 10)
        tree.remember(key, "", "input.0", ONES, 0)
        tree.complete(iteration, world_size=0)
    dump = reader.open(tmp_path)
    assert [(row.key.rank, row.key.iteration) for row in dump.statistics()] == [(5, 3), (5, 4)]
    (row,) = dump.statistics(iteration=4)
    assert (row.op_name, row.number("l2norm")) == (NAME, 2.5)
    assert findings(walk(tmp_path)) == ()


def test_statistic_csv_of_a_device_is_read(tmp_path):
    """MindSpore's asynchronous table, and MSTT's with a format and capital words."""
    folder = tmp_path / STARTED / "0" / "Net" / "1" / "2"
    folder.mkdir(parents=True)
    (folder / "statistic.csv").write_text(
        "Op Type,Op Name,Task ID,Stream ID,Timestamp,IO,Slot,Data Size,Data Type,Format,Shape,"
        "Max Value,MD5 Value\n"
        'Add,a_b,7,3,1795221576504376,Input,0,24,float32,ND,"(2,3)",1,abc,\n'
    )
    (row,) = reader.open(tmp_path).statistics()
    assert (row.key.side, row.key.stream, row.shape) == (TensorSide.INPUT, 3, (2, 3))
    assert (row.number("max"), row.values["MD5"]) == (1, "abc")


TABLE_HEADER = (
    "Op Type,Op Name,Task ID,Stream ID,Timestamp,IO,Slot,Data Size,Data Type,Shape,Max Value"
)


@pytest.mark.parametrize(
    ("header", "line"),
    [
        ("Op Type,Op Name", "Add,a_b"),
        (TABLE_HEADER, "Add,a_b,7,3,1795221576504376,Input,zero,24,float32,(2,3),1"),
        (TABLE_HEADER, "Add,a_b,7"),
    ],
)
def test_damage_of_a_table_of_a_device_names_it_once(tmp_path, header, line):
    """A table that has the rows of all iterations, as where no iteration has a folder."""
    path = tmp_path / STARTED / "0" / "statistic.csv"
    path.parent.mkdir(parents=True)
    path.write_text(f"{header}\n{line}\n")
    with pytest.raises(CorruptedError) as raised:
        list(reader.open(tmp_path).statistics())
    assert str(raised.value).count(path.name) == 1


def test_npy_files_in_a_device_folder_are_read(tmp_path):
    """MindSpore's with a format, MSTT's with an element type."""
    folder = tmp_path / STARTED / "0" / "Net" / "1" / "2"
    folder.mkdir(parents=True)
    data = npy_format.format_npy_header("<f4", ONES.shape) + ONES.tobytes()
    for tail in ("input.0.ND.npy", "input.1.NCHW.bfloat16.npy"):
        (folder / f"Add.a_b.7.3.1795221576504376.{tail}").write_bytes(data)
    first, second = walk(tmp_path).entries
    assert (first.key.tensor_format, first.member) == ("ND", "")
    assert reader.facts(second).dtype == "bfloat16"
    np.testing.assert_array_equal(load(first), ONES)


def test_records_of_npy_files_may_have_a_member(tmp_path):
    """They share the time stamp of their operator, and each has a file of its own."""
    tree = CannTree(tmp_path, "cann-op", device=1, rank=4)
    key = tree.key(3, NAME)._replace(slot=2, tensor_format="ND")
    place = CANN_OP.place_tensor(key, tree.stand, "")
    data = npy_format.format_npy_header("<f4", ONES.shape) + ONES.tobytes()
    write(tmp_path / place.path, [data])
    tree.remember(key, place.path, "input.2", ONES, len(data))
    tree.complete(3, world_size=0)
    (entry,) = walk(tmp_path).entries
    assert (entry.key.rank, entry.key.iteration, entry.key.slot) == (4, 3, 2)
    assert (entry.op_name, entry.member) == (NAME, "")
    assert findings(walk(tmp_path)) == ()
    np.testing.assert_array_equal(load(entry), ONES)


def test_load_by_key_finds_members(tmp_path):
    """Raw names find members; aclnn's order does not matter."""
    tree = CannTree(tmp_path, device=1, rank=1)
    tree.operator(0, NAME, {0: ONES}, {0: HALF})
    tree.operator(0, "aclnnMul_3", {0: -ONES}, {})
    dump = reader.open(tmp_path)
    key = TensorKey(1, "Net", 1, 0, 0, "Add", NAME, TensorSide.OUTPUT, 0)
    np.testing.assert_array_equal(dump.load(key), HALF)
    kernel = key._replace(op_type="aclnnMul_3", op_name="aclnnMul_3", side=TensorSide.INPUT)
    np.testing.assert_array_equal(dump.load(kernel), -ONES)


@pytest.mark.parametrize("complete", [False, True])
def test_load_converts_device_formats(tmp_path, complete):
    """As it lay there, or as people write it, padding cropped; manifests do not hide the header."""
    image = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    padded = np.zeros((2, 16, 4, 5), np.float32)
    padded[:, :3] = image
    blocks = np.ascontiguousarray(padded.reshape(2, 1, 16, 4, 5).transpose(0, 1, 3, 4, 2))
    tree = CannTree(tmp_path)
    path = tree.operator(0, NAME, {0: blocks}, {}, word="NC1HWC0", original=image.shape)
    if complete:
        tree.complete(0)
    dump = reader.open(tmp_path)
    (entry,) = dump.tensors()
    np.testing.assert_array_equal(dump.load(entry), blocks)
    found = dump.load(entry, format="NCHW")
    np.testing.assert_array_equal(found, image)
    assert not found.flags.writeable
    with pytest.raises(UnsupportedError, match=rf"{path.name}: NC1HWC0 cannot be converted to ND"):
        dump.load(entry, format="ND")


def test_open_below_the_root_names_the_root(tmp_path):
    """The message names all trees, and the folder that was probably meant."""
    tree = CannTree(tmp_path / "dump")
    path = tree.operator(0, NAME, {0: ONES}, {})
    with pytest.raises(CorruptedError, match=r"rank_0.*YYYYmmddHHMMSS.*extra-info") as raised:
        reader.open(tmp_path)
    assert "did you mean" not in str(raised.value)
    for folder in list(path.parents)[:4]:
        with pytest.raises(CorruptedError, match=rf"did you mean {tmp_path}/dump\?"):
            reader.open(folder)
    assert len(reader.open(tmp_path / "dump").tensors()) == 1


def test_walk_skips_hidden_and_odd_items(tmp_path):
    """Half-written files, links to themselves, folders with the names of files."""
    path = CannTree(tmp_path).operator(0, NAME, {0: ONES}, {})
    (path.parent / f".{path.name}.tmp").write_bytes(b"x")
    (path.parent / f"{path.name}.zst").mkdir()
    (path.parent / "Add.a.1.2.3").symlink_to("Add.a.1.2.3")
    (tmp_path / STARTED / "7").symlink_to("7")
    found = walk(tmp_path)
    assert [entry.path for entry in found.entries] == [path]
    assert found.foreign == 2
    assert found.problems == ()


def test_manifest_without_members_is_of_the_whole_file(tmp_path):
    """A record without a member is a whole file's."""
    tree = TreeBuilder(tmp_path)
    tree.tensor(0, 0, NAME, ONES)
    manifest = tree.complete(0, 0)
    old = manifest.to_json().replace(b', "member": ""', b"")
    assert Manifest.from_json(old).records[0].member == ""
    assert walk(tmp_path).entries[0].record is not None


WORDS = ("Add", "a_b", "aclnnAdd", "Opdebug", "1", "2", "65535", "1795221576504376", "input")
ENDS = ("output", "0", "ND", "npy", "csv", "zst", "custom", "4", "exception_info", "\udcff", "x,y")
FOLDERS = (
    *("rank_0/Net/0/1", "rank_0/Net/0/constants", f"{STARTED}/0", f"{STARTED}/0/Net/1/2"),
    *("5", f"5/{STARTED}/1/3", "extra-info/data-dump/0"),
)


def write_plain(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


file_names = st.lists(st.sampled_from(WORDS + ENDS), min_size=1, max_size=9).map(".".join)
contents = st.binary(max_size=60) | st.sampled_from(
    [b"".join(bin_parts("net/Add", 1, {0: ONES}, {0: HALF})), b"123,Add.a.1.2.3\n,\n123\n"]
)


@given(st.lists(st.tuples(st.sampled_from(FOLDERS), file_names, contents), max_size=6))
def test_walk_of_arbitrary_files_never_raises(items):
    """Names and bytes of anybody: problems at most, and nothing outside the root."""
    with tempfile.TemporaryDirectory() as root:
        for folder, name, data in items:
            write_plain(Path(root, folder, name), data)
            write_plain(Path(root, folder, "mapping.csv"), b"1,Add.../../x.1.2.3\n2," + data)
        found = walk(Path(root))
        for entry in found.entries:
            assert entry.path.resolve().is_relative_to(Path(root).resolve())
            with contextlib.suppress(CorruptedError, UnsupportedError):
                load(entry)
            with contextlib.suppress(CorruptedError):
                assert entry.key in {each.key for each in locate(entry.path)}
        list(Survey(found, Query()))
        findings(found)
