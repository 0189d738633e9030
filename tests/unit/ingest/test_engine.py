"""Files are taken once, whole and as they were; what is odd is named and left."""

from __future__ import annotations

import os
import socket
import sqlite3
import stat
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support.cann_trees import CannTree
from support.native_tree import (
    bin_bytes,
    frames,
    hidden,
    npy_bytes,
    stored,
    tensor_name,
    write_file,
    write_tree,
)

import rankdump
from rankdump import reader
from rankdump._analysis.table_index import index_tree
from rankdump._core.manifest import Manifest
from rankdump.errors import ConfigError, UnavailableError
from rankdumpd.ingest.dump_file import IngestCounts, IngestTask
from rankdumpd.ingest.runner import IngestRun

FOLDER = "rank_0/Net/0/0"


class Host:
    """A source, a tree, and what was said."""

    def __init__(self, base: Path) -> None:
        self.source, self.tree = base / "source", base / "tree"
        self.source.mkdir()
        self.said: list[str] = []

    def ingest(self, *, delete: bool = False, codec: str = "zstd") -> IngestCounts:
        self.said = []
        task = IngestTask(
            self.source, self.tree, delete=delete, clear=delete, codec=codec, threads=2
        )
        run = IngestRun(task, report=self.said.append)
        assert run.run()
        return run.counts

    def manifests(self) -> dict[str, Manifest]:
        return {
            f"{path.parents[2].name} {path.name.split('.')[0]}": Manifest.from_json(
                path.read_bytes()
            )
            for path in self.tree.glob("rank_*/.dump_metadata/manifest/*.json")
        }


@pytest.fixture
def host(tmp_path: Path, short_waits: None) -> Host:
    return Host(tmp_path)


@pytest.mark.parametrize("codec", ["zstd", "none"])
def test_every_file_byte_for_byte(host: Host, codec: str):
    """Unpacked, the tree is the source; bfloat16 and stray bytes are as MindSpore left them."""
    files = write_tree(host.source)
    counts = host.ingest(codec=codec)
    assert stored(host.tree) == files
    assert (counts.files, counts.failed, counts.skipped) == (len(files), 0, 0)
    assert counts.bytes_in == sum(map(len, files.values()))
    packed = list(host.tree.rglob("*.zst"))
    assert bool(packed) == (codec == "zstd")
    assert not hidden(host.tree)


def test_arrays_are_read_from_it(host: Host):
    """The reader gives what it gives of the source, long names included."""
    write_tree(host.source)
    host.ingest()
    ours, theirs = rankdump.open(host.tree), rankdump.open(host.source)
    by_key = {entry.key: entry for entry in ours.tensors()}
    assert {entry.key for entry in theirs.tensors()} == set(by_key)
    for entry in theirs.tensors():
        np.testing.assert_array_equal(ours.load(by_key[entry.key]), theirs.load(entry))


def test_again_nothing_is_taken(host: Host):
    """A second run knows the first, and takes what was added, and what has changed."""
    files = write_tree(host.source)
    host.ingest()
    counts = host.ingest()
    assert (counts.files, counts.skipped) == (0, len(files))
    table = host.source / "rank_0/execution_order/ms_execution_order_graph_0.csv"
    table.chmod(0o600)
    with table.open("a") as file:
        file.write("C\n")
    write_file(host.source / FOLDER / tensor_name("late", 99), npy_bytes(np.ones(3)))
    counts = host.ingest()
    assert (counts.files, counts.skipped) == (2, len(files) - 1)
    assert stored(host.tree)[table.relative_to(host.source).as_posix()] == b"Head\nA\nB\nC\n"


def test_same_bytes_are_one_file(host: Host):
    """Identical tensors share an inode, also with those of an earlier run."""
    data = npy_bytes(np.arange(5000.0))
    for number in range(3):
        write_file(host.source / FOLDER / tensor_name(f"a{number}", number), data)
    counts = host.ingest()
    assert (counts.files, counts.linked) == (3, 2)
    write_file(host.source / FOLDER / tensor_name("a9", 9), data)
    assert host.ingest().linked == 1
    inodes = Counter(path.stat().st_ino for path in host.tree.rglob("*.npy.zst"))
    assert list(inodes.values()) == [4]
    (manifest,) = host.manifests().values()
    assert (manifest.status.stored, manifest.status.linked) == (1, 3)


def test_a_link_is_never_to_a_file_that_changed(host: Host):
    """What stands in the tree is asked of the disk, not of the state."""
    data = npy_bytes(np.arange(5000.0))
    write_file(host.source / FOLDER / tensor_name("a", 1), data)
    host.ingest()
    (first,) = host.tree.rglob("*.npy.zst")
    first.chmod(0o600)
    first.write_bytes(b"something else")
    write_file(host.source / FOLDER / tensor_name("b", 2), data)
    host.ingest()
    assert list(stored(host.tree).values()) == [data, data]


def test_bin_files_are_packed_by_payload(host: Host):
    """One frame for the header, one for each payload, one for what nobody reads."""
    one, two = np.ones(3000, np.float32), np.arange(3000, dtype=np.float32) % 7
    data = bin_bytes(one, two, trailing=b"rest")
    write_file(host.source / FOLDER / "Add.net_Add.3.1.1700000000000900", data)
    host.ingest()
    (path,) = host.tree.rglob("Add.*.zst")
    header, *rest = frames(path)
    assert rest == [one.tobytes(), two.tobytes(), b"rest"]
    assert header + b"".join(rest) == data
    (manifest,) = host.manifests().values()
    assert [(r.member, r.op_name, r.dtype, r.shape) for r in manifest.records] == [
        ("input.0", "net/Add", "float32", (3000,)),
        ("output.0", "net/Add", "float32", (3000,)),
    ]
    assert sum(r.bytes_stored for r in manifest.records) == path.stat().st_size


def test_manifests_balance(host: Host):
    """Each rank and iteration has one, with all of its tensors and no more."""
    write_tree(host.source)
    host.ingest()
    manifests = host.manifests()
    assert sorted(manifests) == [f"rank_{r} iteration_{i}" for r in (0, 1) for i in (0, 1)]
    for manifest in manifests.values():
        status = manifest.status
        assert status.is_balanced
        assert status.complete
        assert status.expected == len(manifest.records) == 9  # a bin file has two
        assert manifest.world_size == 0  # nobody can know
        long = [record for record in manifest.records if "a-A_a-A_" in record.op_name]
        assert [record.dtype for record in long] == ["float32"]
        assert {r.dtype for r in manifest.records if "bf16" in r.op_name} == {"bfloat16"}
    view = reader.status(host.tree)
    assert all(iteration.complete for iteration in view.iterations)
    assert not any("no folder" in finding for finding in view.findings)


def test_an_iteration_is_rewritten_when_more_comes(host: Host):
    write_tree(host.source)
    host.ingest()
    write_file(host.source / FOLDER / tensor_name("late", 99), npy_bytes(np.ones(3)))
    host.ingest()
    assert host.manifests()["rank_0 iteration_0"].status.expected == 10


def test_own_manifests_are_kept(host: Host):
    """A tree that rankdump made has some: they are copied, and there are no others."""
    write_tree(host.source)
    name = "rank_0/.dump_metadata/manifest/iteration_0.session.json"
    write_file(host.source / name, b"{}")
    host.ingest()
    folder = host.tree / "rank_0/.dump_metadata/manifest"
    assert [p.name for p in folder.glob("iteration_0.*")] == ["iteration_0.session.json"]
    assert len(list(folder.glob("iteration_1.*"))) == 1


def test_figures_without_tensors(host: Host):
    """Where MindSpore kept figures only, the rows of the table are the iteration's tensors."""
    title = (
        "Op Type,Op Name,Task ID,Stream ID,Timestamp,IO,Slot,Data Size,Data Type,Shape,Max Value"
    )
    row = 'Conv,Default_conv-op0,0,0,1700000000000001,output,0,24,float32,"(2,3)",1.5,'
    write_file(host.source / FOLDER / "statistic.csv", f"{title}\n{row}\n".encode())
    host.ingest()
    (manifest,) = host.manifests().values()
    (record,) = manifest.records
    assert (record.path, record.op_name, record.shape) == ("", "Default_conv-op0", (2, 3))
    assert len(rankdump.open(host.tree).statistics()) == 1


DAMAGED = {
    tensor_name("short", 1): npy_bytes(np.ones(100))[:-8],
    tensor_name("long", 2): npy_bytes(np.ones(100)) + b"x" * 9,
    tensor_name("none", 3): b"",
    tensor_name("other", 4): b"not numpy at all",
    tensor_name("huge", 5): npy_bytes(np.ones(1)).replace(b"(1,)", b"(9" + b"9" * 18 + b",)"),
    tensor_name("type", 6): npy_bytes(np.ones(1)).replace(b"<f8", b"<f3"),
    tensor_name("deep", 7): b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 0xFFFF,
    "Add.net_Add.3.1.1700000000000901": bin_bytes(np.ones(9))[:-1],
    "Add.net_Add.3.1.1700000000000902": b"\xff" * 8 + b"x" * 100,
    "77777777777": b"1234",
}


def test_tables_of_operators_are_rows_of_manifests(host: Host):
    """Also of one with a number in place of a long name, which ends like a bin file."""
    tree = CannTree(host.source)
    header = "Input/Output,Index,Data Size,Data Type,Format,Shape,Max Value"
    rows = ["Input,0,24,DT_FLOAT,ND,2x3,1.5", "Output,1,4,DT_BF16,ND,2,NaN"]
    for name in ("Default/fc/MatMul-op0", "Default/" + "block/" * 50 + "MatMul-op0"):
        tree.table(3, name, [header, *rows])
    tree.table(3, "Default/Damaged-op0", [header, "Input,?"])
    assert host.ingest().failed == 0
    records = host.manifests()["rank_0 iteration_3"].records
    found = [(each.op_type, each.member, each.dtype, each.shape) for each in records]
    assert (
        found
        == [
            ("MatMul", "input.0", "float32", (2, 3)),
            ("MatMul", "output.1", "bfloat16", (2,)),
        ]
        * 2
    )
    index_tree(host.tree)
    sql = "SELECT count(*) AS n, sum(max) FILTER (side = 'input') AS m FROM tensors"
    assert rankdump.open(host.tree).sql(sql).to_pylist() == [{"n": 4, "m": 3.0}]


@pytest.mark.parametrize("delete", [False, True])
def test_damaged_files_are_named_and_left(host: Host, delete: bool):
    """One line each, nothing of them in the tree, and the source as it was."""
    for name, data in DAMAGED.items():
        write_file(host.source / FOLDER / name, data)
    write_file(host.source / FOLDER / tensor_name("good", 50), npy_bytes(np.ones(3)))
    counts = host.ingest(delete=delete)
    assert (counts.files, counts.failed) == (1, len(DAMAGED))
    assert sorted(line.split(":")[0] for line in host.said) == sorted(
        f"{FOLDER}/{name}" for name in DAMAGED
    )
    assert all("\n" not in line for line in host.said)
    left = {path.name: path.read_bytes() for path in (host.source / FOLDER).iterdir()}
    assert {name: left[name] for name in DAMAGED} == DAMAGED
    assert list(stored(host.tree)) == [f"{FOLDER}/{tensor_name('good', 50)}"]


def test_links_devices_and_pipes(host: Host, tmp_path: Path):
    """Nothing is followed out of the folder; odd names are only names."""
    (tmp_path / "secret").mkdir()
    write_file(tmp_path / "secret" / "key", b"secret")
    odd = ["..x", "a\nb", " ", "\udcff.txt", "-rf", "x" * 255]
    for name in odd:
        write_file(host.source / name, b"kept")
    (host.source / "out").symlink_to(tmp_path / "secret")
    (host.source / "file").symlink_to(tmp_path / "secret" / "key")
    (host.source / "inside").symlink_to(odd[0])
    (host.source / "nothing").symlink_to("nowhere")
    os.mkfifo(host.source / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(host.source)
        try:
            server.bind("socket")
        finally:
            os.chdir(here)
        counts = host.ingest(delete=True)
    assert set(stored(host.tree)) == set(odd)
    assert (counts.failed, counts.skipped) == (5, 1)
    said = {line.split(":")[0] for line in host.said}
    assert said == {"out", "file", "nothing", "pipe", "socket"}
    assert (tmp_path / "secret" / "key").read_bytes() == b"secret"
    assert sorted(path.name for path in host.source.iterdir()) == [
        "file",
        "inside",
        "nothing",
        "out",
        "pipe",
        "socket",
    ]


def test_long_names_stay_plain(host: Host):
    """A name that has no room for the suffix is stored unpacked."""
    name = tensor_name("n" * (255 - len(tensor_name("", 1))), 1)
    assert len(name) == 255
    write_file(host.source / FOLDER / name, npy_bytes(np.zeros(10_000)))
    host.ingest()
    assert (host.tree / FOLDER / name).is_file()


def test_another_file_is_never_overwritten(host: Host):
    """What stands in the tree already and did not come from here is somebody's."""
    name = f"{FOLDER}/{tensor_name('a', 1)}"
    write_file(host.source / name, npy_bytes(np.ones(3)))
    write_file(host.tree / name, b"mine")
    assert host.ingest(delete=True).failed == 1
    assert "another file" in host.said[0]
    assert (host.tree / name).read_bytes() == b"mine"
    assert (host.source / name).exists()


@pytest.mark.parametrize(("first", "second"), [("zstd", "none"), ("none", "zstd")])
def test_a_killed_run_goes_on_with_another_codec(host: Host, first: str, second: str):
    """What stood there uncommitted goes: a tensor must not be there under two names."""
    name = f"{FOLDER}/{tensor_name('a', 1)}"
    write_file(host.source / name, npy_bytes(np.zeros(9000)))
    host.ingest(codec=first)
    with sqlite3.connect(host.tree / ".rankdump" / "ingest.sqlite") as base:
        base.execute("INSERT INTO claims SELECT path FROM files")
        base.execute("DELETE FROM files")
    base.close()
    assert host.ingest(codec=second).failed == 0
    assert stored(host.tree) == {name: npy_bytes(np.zeros(9000))}


def test_packed_beside_plain(host: Host):
    """Two files that would be one in the tree: only the plain one is taken."""
    name = f"{FOLDER}/{tensor_name('a', 1)}"
    write_file(host.source / name, npy_bytes(np.zeros(9000)))
    write_file(host.source / f"{name}.zst", b"whatever")
    assert host.ingest().failed == 1
    assert stored(host.tree) == {name: npy_bytes(np.zeros(9000))}


def test_sources_go_and_so_do_empty_folders(host: Host):
    files = write_tree(host.source)
    counts = host.ingest(delete=True)
    assert counts.removed == len(files)
    assert list(host.source.iterdir()) == []
    assert stored(host.tree) == files
    assert host.ingest(delete=True).files == 0


def test_what_is_taken_unsynced_is_taken_again_before_it_is_removed(host: Host):
    """Without --delete-source nothing was made to survive a fall of the machine."""
    files = write_tree(host.source)
    host.ingest()
    counts = host.ingest(delete=True)
    assert (counts.files, counts.removed) == (len(files), len(files))
    assert stored(host.tree) == files


def test_a_new_file_under_the_name_of_a_removed_one(host: Host):
    """It would take the place of what is nowhere else: it is left."""
    name = f"{FOLDER}/{tensor_name('a', 1)}"
    write_file(host.source / name, npy_bytes(np.zeros(3)))
    host.ingest(delete=True)
    write_file(host.source / name, npy_bytes(np.ones(3)))
    assert host.ingest(delete=True).failed == 1
    assert stored(host.tree) == {name: npy_bytes(np.zeros(3))}
    assert (host.source / name).exists()
    (host.source / name).unlink()
    write_file(host.source / name, npy_bytes(np.zeros(3)))
    counts = host.ingest(delete=True)
    assert (counts.failed, counts.removed) == (0, 1)


def test_a_file_that_somebody_writes_is_left(host: Host):
    """The kernel says so; it is named, and not removed."""
    files = write_tree(host.source)
    name = f"{FOLDER}/{tensor_name('a', 1)}"
    write_file(host.source / name, npy_bytes(np.zeros(3)))
    (host.source / name).chmod(0o600)
    with (host.source / name).open("r+b"):
        assert host.ingest(delete=True).failed == 1
    assert "writing" in host.said[0]
    assert (host.source / name).exists()
    assert host.ingest(delete=True).failed == 0
    assert set(stored(host.tree)) == {*files, name}


def test_modes_of_the_tree(host: Host):
    write_tree(host.source)
    host.ingest()
    modes = {stat.S_IMODE(p.stat().st_mode) for p in (host.tree / "rank_0").rglob("*.npy*")}
    assert modes == {0o440}


def test_folders_within_each_other_are_refused(host: Host):
    for source, tree in (
        (host.source, host.source / "tree"),
        (host.source / "a", host.source),
        (host.source, host.source),
    ):
        source.mkdir(exist_ok=True)
        with pytest.raises(ConfigError, match="does not contain it"):
            IngestRun(IngestTask(source, tree), report=print)


def test_two_at_once_are_refused(host: Host):
    first = IngestRun(IngestTask(host.source, host.tree), report=print)
    with pytest.raises(UnavailableError, match="used by another ingest"):
        IngestRun(IngestTask(host.source, host.tree), report=print)
    assert first.run()
    host.ingest()


def test_a_large_file_is_mapped(host: Host, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rankdumpd.ingest.file_copy.MIN_MAPPED_BYTES", 1000)
    files = write_tree(host.source)
    assert host.ingest(delete=True).failed == 0
    assert stored(host.tree) == files


def test_a_full_disk_is_said_and_nothing_is_lost(host: Host, monkeypatch: pytest.MonkeyPatch):
    files = write_tree(host.source)

    def full(*_args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("rankdumpd.agent.storage.tree.os.write", full)
        counts = host.ingest(delete=True)
        assert (counts.files, counts.failed, counts.removed) == (0, len(files), 0)
        assert "No space left" in host.said[0]
    assert host.ingest(delete=True).removed == len(files)
    assert stored(host.tree) == files
    assert not hidden(host.tree)
