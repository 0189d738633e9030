"""Check of trees: every changed byte of a file that a manifest names is found."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.flipped_bytes import flipped
from support.native_tree import write_tree
from support.tree_builder import TreeBuilder

from rankdump._analysis.fsck.damage import DamageKind
from rankdump._analysis.fsck.repair import MIN_UNWRITTEN_AGE_S, repair_tree
from rankdump._analysis.fsck.tree_check import check_tree
from rankdump._cli.command_group import run_command_line
from rankdump._codec.file_codec import get_codec
from rankdump._codec.zstd_frames import make_stored_frame
from rankdump._core.execution_order import (
    GLOBAL_ORDER_FOLDER,
    ORDER_HEADER,
    make_order_file_name,
)
from rankdump._core.npy_format import parse_npy_header
from rankdump.errors import CorruptedError
from rankdump.reader import walk

GOLDEN = Path(__file__).parents[5] / "shared" / "golden"
TYPES = ("float32", "float16", "int64", "uint8", "bool", "complex64")
TENSOR = st.tuples(
    st.sampled_from(TYPES),
    st.lists(st.integers(0, 9), max_size=3),
    st.sampled_from(["zstd", "none"]),
    st.booleans(),
)


def build(root: Path, tensors: list[tuple[str, list[int], str, bool]]) -> list[Path]:
    builder = TreeBuilder(root)
    chance = np.random.default_rng(len(tensors))
    paths = []
    for number, (dtype, shape, codec, varied) in enumerate(tensors):
        values = chance.integers(0, 5 if varied else 1, shape).astype(dtype)
        name = f"Default/net-Net/{'long' * 70 if number == 1 else number}/X-op0"
        paths.append(builder.tensor(0, 0, name, values, codec=codec))
    builder.complete(0, 0, world_size=1)
    return paths


@settings(max_examples=60, deadline=None)
@given(st.lists(TENSOR, min_size=1, max_size=4), st.data())
def test_every_changed_byte_of_a_file_is_found(tensors, data):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        paths = build(root, tensors)
        report = check_tree(root, workers=2)
        assert (report.damages, report.digests) == ((), len(tensors))
        path = data.draw(st.sampled_from(paths))
        at = data.draw(st.integers(0, path.stat().st_size - 1))
        with flipped(path, at, data.draw(st.integers(1, 255))):
            (damage,) = check_tree(root, workers=1).damages
        assert (damage.kind, damage.path) == (DamageKind.TORN, str(path.relative_to(root)))


def store_unpacked(path: Path) -> None:
    """Replace a packed file by its content in a frame that packs nothing, as an agent writes it
    under pressure."""
    content = bytes(get_codec("zstd").decode(path.read_bytes(), limit_bytes=1 << 20))
    header_bytes = parse_npy_header(content).data_offset
    parts = content[:header_bytes], content[header_bytes:]
    path.write_bytes(b"".join(make_stored_frame(parts)))


@pytest.mark.parametrize("when", ["before", "after"])
def test_files_are_checked_in_both_states(tmp_path: Path, when: str):
    """A file that is packed later is whole whether its manifest has the size before or after."""
    builder = TreeBuilder(tmp_path)
    paths = [builder.tensor(0, 0, f"Default/{n}/X-op0", np.arange(100 * n)) for n in range(3)]
    builder.complete(0, 0, world_size=1)
    packed = [path.read_bytes() for path in paths]
    for path in paths:
        store_unpacked(path)
    if when == "before":
        sizes = {str(path.relative_to(tmp_path)): path.stat().st_size for path in paths}
        records = builder.records[0, 0]
        records[:] = [each._replace(bytes_stored=sizes[each.path]) for each in records]
        builder.complete(0, 0, world_size=1)
        check_clean_and_changed(tmp_path, paths)
        for path, data in zip(paths, packed, strict=True):
            path.write_bytes(data)
    assert walk(tmp_path).problems == ()
    check_clean_and_changed(tmp_path, paths)


def check_clean_and_changed(root: Path, paths: list[Path]) -> None:
    """No damage is found in files as they are, and one in each that has another byte or fewer."""
    report = check_tree(root, workers=1)
    assert (report.damages, report.digests) == ((), len(paths))
    for path in paths:
        data = path.read_bytes()
        for at in (*range(32), *range(32, len(data), 97), len(data) - 1):
            with flipped(path, at, 1 + at % 255):
                (damage,) = check_tree(root, workers=1).damages
            assert damage.kind is DamageKind.TORN
        path.write_bytes(data[:-1])
        (damage,) = check_tree(root, workers=1).damages
        assert damage.kind is DamageKind.TORN
        path.write_bytes(data)


@settings(max_examples=40, deadline=None)
@given(st.lists(TENSOR, min_size=2, max_size=4), st.data())
def test_check_after_a_repair_finds_only_the_rest(tensors, data):
    """Whatever is done to a tree, a second check after the repair finds what was left, no more."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        paths = build(root, tensors)
        for number, path in enumerate(data.draw(st.lists(st.sampled_from(paths), unique=True))):
            match data.draw(st.sampled_from(["cut", "remove", "copy", "half", "link", "foreign"])):
                case "cut":
                    os.truncate(path, data.draw(st.integers(0, path.stat().st_size - 1)))
                case "remove":
                    path.unlink()
                case "copy":
                    shutil.copy(
                        path, path.with_name(f"X.Other{number}.0.0.9.output.0.DefaultFormat.npy")
                    )
                case "half":
                    path.with_name(f".{path.name[:99]}.tmp").write_bytes(b"half")
                case "link":
                    path.with_name(f"{number}.npy").symlink_to(path)
                case _:
                    path.with_name("notes").write_text("mine")
        before = {each.name for each in root.rglob("*")}
        left = repair_tree(root, check_tree(root, workers=1))
        assert check_tree(root, workers=1).damages == left.damages
        gone = before - {each.name for each in root.rglob("*")}
        assert all(name.startswith(".") for name in gone)


def test_every_changed_byte_of_a_manifest_is_found(tmp_path):
    build(tmp_path, [("float32", [3], "none", True)])
    (path,) = tmp_path.rglob("iteration_0.*.json")
    relative = str(path.relative_to(tmp_path))
    end = path.read_bytes().index(b', "crc32"')
    for at in range(0, end, 7):
        with flipped(path, at, 1 + at % 255):
            damages = check_tree(tmp_path, workers=1).damages
        assert relative in {each.path for each in damages if each.kind is DamageKind.MANIFEST}, at


def test_check_follows_no_links(tmp_path):
    """Neither folders nor files, wherever they point; and a link to a whole file is none."""
    root, outside = tmp_path / "tree", tmp_path / "outside"
    build(outside, [("float32", [3], "none", True)])
    first, _ = build(root, [("float32", [4], "none", True)] * 2)
    (outside / "secret").write_text("x")
    target = first.with_name("moved")
    first.rename(outside / "moved")
    first.symlink_to(outside / "moved")
    planted = [root / "rank_7", root / "rank_0/Other", root / "rank_0/execution_order"]
    for path in planted:
        path.symlink_to(outside / "rank_0", target_is_directory=True)
    (root / "rank_0/.dump_metadata/manifest/iteration_4.x.json").symlink_to(outside / "secret")
    (root / "rank_0/.dump_metadata/config.json").symlink_to(outside / "secret")
    report = check_tree(root, workers=1)
    assert {each.kind for each in report.damages} == {DamageKind.FOREIGN}
    assert len(report.damages) == 6
    assert report.files == 1
    assert not target.exists()


def test_repair_keeps_recent_leftovers_without_leases(tmp_path, monkeypatch):
    """Where no lease is given, age says whether somebody still writes."""
    (first,) = build(tmp_path, [("float32", [3], "none", True)])
    young, old = first.with_name(".a.tmp"), first.with_name(".b.tmp")
    for path in (young, old):
        path.write_bytes(b"half")
    long_ago = young.stat().st_mtime - MIN_UNWRITTEN_AGE_S - 1
    os.utime(old, (long_ago, long_ago))

    def refuse(*_):
        raise PermissionError(13, "not the owner")

    monkeypatch.setattr("rankdump._analysis.fsck.repair.fcntl.fcntl", refuse)
    left = repair_tree(tmp_path, check_tree(tmp_path, workers=1))
    assert ([each.path[-6:] for each in left.damages], young.exists()) == ([".a.tmp"], True)
    assert not old.exists()


def test_interrupted_removal_is_a_leftover(tmp_path):
    """An iteration that is being removed has a hidden manifest; whoever began goes on with it."""
    build(tmp_path, [("float32", [3], "none", True)])
    (path,) = tmp_path.rglob("iteration_0.*.json")
    path.rename(path.with_name(f".{path.name}"))
    report = check_tree(tmp_path, workers=1)
    (damage,) = report.damages
    assert (damage.kind, damage.mendable) == (DamageKind.LEFTOVER, False)


def test_tables_are_checked_against_manifests(tmp_path):
    builder = TreeBuilder(tmp_path)
    names = [f"Default/{number}/X-op0" for number in range(3)]
    table = [builder.row(0, 0, name, np.ones(3, np.float32)) for name in names][-1]
    builder.complete(0, 0, world_size=1)
    assert check_tree(tmp_path, workers=1).damages == ()
    whole = table.read_bytes()
    table.write_bytes(whole[:-1])
    assert {each.kind for each in check_tree(tmp_path, workers=1).damages} >= {DamageKind.TORN}
    table.write_bytes(whole[: whole.rindex(b"\n", 0, -1) + 1])
    (damage,) = check_tree(tmp_path, workers=1).damages
    assert (damage.kind, damage.text) == (
        DamageKind.MISSING,
        "the manifest names 3 rows of tables, but the tables have 2",
    )


def trees() -> list[Path]:
    found = [*GOLDEN.glob("mindspore/*"), *GOLDEN.glob("troubleshooter/1.*")]
    return [path for path in found if path.is_dir()]


def test_trees_of_other_tools_are_clean():
    """Where they are at hand: nothing says what should be in them, and that is said."""
    for root in trees():
        report = check_tree(root, workers=1)
        assert (report.damages, report.files) == ((), 0)
        assert report.unchecked[0].startswith("no manifest")


def test_tree_without_manifests_is_not_verifiable(tmp_path, capsys):
    """What was looked at is said, and what was not; no script takes it for a tree that is whole."""
    write_tree(tmp_path)
    report = check_tree(tmp_path, workers=1)
    assert (report.damages, report.is_verifiable) == ((), False)
    assert run_command_line(["fsck", str(tmp_path)]) == 1
    *_, why, last = capsys.readouterr().out.splitlines()
    assert why.startswith("no manifest: the expected files and their content are not known")
    assert "no tensor was checked" in last
    assert f"only the names of {report.looked_at} files were checked" in last
    assert "no problem found" not in last
    assert run_command_line(["fsck", str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["clean"] is False


def test_folder_without_a_dump_is_an_error(tmp_path, capsys):
    """An empty folder, and one with files of somebody else."""
    for _ in range(2):
        assert run_command_line(["fsck", str(tmp_path)]) == 1
        captured = capsys.readouterr()
        assert (captured.out, captured.err.count("\n")) == ("", 1)
        assert f"{tmp_path}: not a dump tree" in captured.err
        (tmp_path / "notes.txt").write_text("x")


def test_hard_links_are_read_once(tmp_path, capsys):
    """One file under several names, of whichever operators; each of its tensors is sure."""
    builder = TreeBuilder(tmp_path)
    values = np.ones(5, np.float32)
    names = [f"Default/{number}/X-op0" for number in range(3)]
    first, *others = [builder.tensor(0, 0, name, values) for name in names]
    for other in others:
        other.unlink()
        other.hardlink_to(first)
    builder.complete(0, 0, world_size=1)
    report = check_tree(tmp_path, workers=1)
    assert (report.files, report.names, report.digests, report.damages) == (1, 3, 3, ())
    assert report.bytes_read == first.stat().st_size
    assert run_command_line(["fsck", str(tmp_path)]) == 0
    assert "1 file read" in capsys.readouterr().out
    with flipped(first, 20, 1):
        assert len(check_tree(tmp_path, workers=1).damages) == 3


def test_unreadable_root_is_an_error(tmp_path):
    with pytest.raises(CorruptedError, match="cannot be read"):
        check_tree(tmp_path / "none", workers=1)


def test_manifest_without_a_checksum_is_accepted(tmp_path):
    build(tmp_path, [("float32", [3], "none", True)])
    (path,) = tmp_path.rglob("iteration_0.*.json")
    body = json.loads(path.read_bytes())
    del body["crc32"]
    path.write_text(json.dumps(body))
    assert check_tree(tmp_path, workers=1).damages == ()


def test_long_name_without_its_file_is_missing(tmp_path):
    """Where no manifest says what should be there, the table of long names does."""
    folder = tmp_path / "rank_0/Net/0/0"
    folder.mkdir(parents=True)
    full = "ReLU.Default_ReLU-op0.0.0.1795225611075645.input.0.DefaultFormat.npy"
    (folder / "436493186.npy").write_bytes(b"x")
    (folder / "mapping.csv").write_text(f"436493186.npy,{full}\n591914022.npy,{full}\n")
    (damage,) = check_tree(tmp_path, workers=1).damages
    assert (damage.kind, damage.path) == (DamageKind.MISSING, "rank_0/Net/0/0/591914022.npy")
    (folder / "591914022.npy.zst").write_bytes(b"x")
    assert check_tree(tmp_path, workers=1).damages == ()


def test_order_without_its_beginning_or_end_is_torn(tmp_path):
    build(tmp_path, [("float32", [2], "zstd", True)])
    folder = tmp_path / GLOBAL_ORDER_FOLDER
    folder.mkdir()
    for name, content in (
        (make_order_file_name(0), ORDER_HEADER),
        (make_order_file_name(1), ""),
        (make_order_file_name(2), ORDER_HEADER + "0,0,2,"),
        (make_order_file_name(3), ORDER_HEADER.replace("position", "place")),
    ):
        (folder / name).write_text(content)
    found = [(each.kind, each.path[-5:]) for each in check_tree(tmp_path, workers=1).damages]
    assert found == [(DamageKind.TORN, f"{graph}.csv") for graph in (1, 2, 3)]
