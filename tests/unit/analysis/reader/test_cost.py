"""Cost of reading: folders and files that are opened, and memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tracemalloc
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from support.cann_trees import CannTree
from support.tree_builder import TreeBuilder

from rankdump._analysis.reader.tree import Entries
from rankdump._core.plan import IterationSelection
from rankdump._core.record import TensorSide
from rankdump._layout.tree_paths import MANIFEST_FOLDER
from rankdump.errors import CorruptedError
from rankdump.reader import Query, Tree, findings, observe, status, walk
from rankdump.reader import open as open_dump

ONES = np.ones((2, 3), np.float32)
OPENED = """
import json, sys
root, opened = sys.argv.pop(1), []
def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith(root + "/"):
        opened.append(arguments[0][len(root) + 1:])
sys.addaudithook(hook)
from rankdump._cli.command_group import run_command_line
code = run_command_line(sys.argv[1:])
json.dump([code, opened], sys.stderr)
"""


def grown(root: Path, ranks: int = 2, iterations: int = 4, operators: int = 2) -> TreeBuilder:
    """Ranks that dumped a constant and these operators in every iteration."""
    tree = TreeBuilder(root / "tree")
    for rank in range(ranks):
        for iteration in range(iterations):
            for at in range(operators):
                name = f"Default/network-Net/layers-{at}/Linear-op{at}"
                tree.tensor(rank, iteration, name, ONES, side=TensorSide.INPUT, codec="none")
                tree.tensor(rank, iteration, name, -ONES, codec="none")
            if not iteration:
                tree.tensor(rank, 0, "mask", np.eye(2), op_type="Parameter", constant=True)
            tree.complete(rank, iteration, world_size=ranks)
    return tree


def opened(root: Path, *command: str) -> set[str]:
    """Return what below a tree a command opened, files and folders."""
    done = subprocess.run(
        [sys.executable, "-c", OPENED, str(root), *command, str(root)],
        capture_output=True,
        text=True,
        check=True,
    )
    code, paths = json.loads(done.stderr)
    assert code == 0, done.stdout
    return set(paths)


def test_filters_open_only_the_selected_rank_and_iteration(tmp_path):
    """Other ranks and iterations are passed over by their names, and so are their manifests."""
    tree = grown(tmp_path)
    manifest = f"rank_0/{MANIFEST_FOLDER}/iteration_3.session0.json"
    paths = opened(tree.root, "ls", "--rank", "0", "--iteration", "3")
    assert {path for path in paths if path.startswith("rank_1/")} == set()
    assert {path for path in paths if path.endswith((".json", ".npy"))} == {manifest}
    tensors = {path for path in paths if path.startswith("rank_0/Net/0/")}
    assert tensors == {"rank_0/Net/0/3"}


def test_job_filter_opens_no_manifest_of_other_jobs(tmp_path):
    """But one of each session: these say whose they are."""
    root = grown(tmp_path).root
    late = TreeBuilder(root, job="late", clock_us=1_800_000_000_000_000)
    for rank, iteration in product(range(2), range(4)):
        late.tensor(rank, iteration, "Default/a-A/A-op0", ONES, codec="none")
        late.complete(rank, iteration, session=f"late{rank}")
    paths = opened(root, "ls", "--rank", "0", "--iteration", "3", "--job", "late")
    manifests = {path for path in paths if path.endswith(".json")}
    assert manifests == {f"rank_0/{MANIFEST_FOLDER}/iteration_3.late0.json"} | {
        f"rank_{rank}/{MANIFEST_FOLDER}/iteration_0.{session}{rank}.json"
        for rank, session in product(range(2), ("session", "late"))
    }
    assert {path for path in paths if path.startswith("rank_0/Net/0/")} == {"rank_0/Net/0/3"}


def test_part_of_a_dump_is_read_once_on_first_use(tmp_path, monkeypatch):
    """Once: its own parts, and a second question, are answered from what was read."""
    tree = grown(tmp_path)
    asked: list[tuple[Query, ...]] = []

    def counted(root: Path, *queries: Query, job_id: str, attempt: int | None) -> Tree:
        asked.append(queries)
        return walk(root, *queries, job_id=job_id, attempt=attempt)

    monkeypatch.setattr("rankdump._analysis.reader.dump.walk", counted)
    dump = open_dump(tree.root)
    part = dump.where(rank=1)
    assert asked == []
    assert (part.iterations, len(part.tensors(iteration=2, side="input"))) == ((0, 1, 2, 3), 2)
    assert len(dump.tensors(rank=1, operator="*Linear*")) == 16
    assert asked == [(Query(rank=1),)]
    key = part.tensors(iteration=3)[0].key
    np.testing.assert_array_equal(part.load(key), ONES)
    assert len(asked) == 1
    assert (dump.ranks, len(dump.tensors(rank=0))) == ((0, 1), 17)
    assert asked[1:] == [()]


def test_load_by_key_reads_only_its_iteration(tmp_path):
    """That of other ranks and iterations may be gone."""
    tree = grown(tmp_path)
    key = open_dump(tree.root).tensors(rank=1, iteration=2)[0].key
    shutil.rmtree(tree.root / "rank_0")
    shutil.rmtree(tree.root / "rank_1/Net/0/3")
    (tree.root / "rank_0").mkdir()
    dump = open_dump(tree.root)
    np.testing.assert_array_equal(dump.load(key), ONES)
    assert dump.where(rank=1, iteration=2).problems == ()
    assert len(dump.problems) == 4


def test_status_opens_no_folder_with_a_manifest(tmp_path):
    """Of such an iteration the balance is read, which stands in front of the records."""
    tree = grown(tmp_path)
    tree.tensor(1, 4, "Default/a-A/A-op0", ONES)
    paths = opened(tree.root, "status")
    assert {path for path in paths if path.startswith("rank_1/Net/0/")} == {"rank_1/Net/0/4"}
    assert {path for path in paths if path.startswith("rank_0/Net/0/")} == set()
    for path in tree.root.glob(f"rank_*/{MANIFEST_FOLDER}/*.json"):
        head, line, _ = path.read_bytes().partition(b'"records": [\n')
        path.write_bytes(head + line + b"nobody reads this")
    view = status(tree.root)
    assert [(i.rank, i.iteration, i.stored, i.complete) for i in view.iterations] == [
        *((rank, at, 5 if not at else 4, True) for rank in (0, 1) for at in range(4)),
        (1, 4, 1, False),
    ]
    assert view.findings == ("rank 0: iteration 4 is missing, other ranks have it",)


def test_manifest_with_an_unusual_first_line_is_read_whole(tmp_path):
    tree = grown(tmp_path, ranks=1, iterations=1)
    (path,) = tree.root.glob(f"rank_0/{MANIFEST_FOLDER}/*.json")
    path.write_text(json.dumps(json.loads(path.read_text()), indent=1))
    (iteration,) = status(tree.root).iterations
    assert (iteration.complete, iteration.stored) == (True, 5)
    path.write_bytes(b"{")
    (damage,) = status(tree.root).findings
    assert path.name in damage


def test_forecast_opens_no_files_with_records(tmp_path):
    """It is the same when all tensors are gone."""
    tree = grown(tmp_path)
    expected = observe(tree.root)
    assert expected.per_iteration.tensors == 2 * 4
    assert expected.per_job.tensors == 2
    for path in tree.root.rglob("*.npy"):
        path.unlink()
    assert observe(tree.root) == expected
    shutil.rmtree(tree.root / "rank_0" / MANIFEST_FOLDER)
    shutil.rmtree(tree.root / "rank_1" / MANIFEST_FOLDER)
    with pytest.raises(CorruptedError, match="complete"):
        observe(tree.root)


def test_tree_takes_less_than_300_bytes_per_tensor(tmp_path):
    """What repeats from rank to rank and from iteration to iteration is held once."""
    tree = grown(tmp_path, iterations=6, operators=100)
    walk(tree.root)  # what is remembered for good
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        found = walk(tree.root)
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(found.entries) == 2 * (6 * 200 + 1)
    assert held / len(found.entries) < 300


QUERIES = [
    Query(rank=1),
    Query(rank=7),
    Query(graph=1),
    Query(iterations=IterationSelection("3", ((3, 3),))),
    Query(rank=0, iterations=IterationSelection("0-1", ((0, 1),))),
    Query(rank=1, graph=1, iterations=IterationSelection("2", ((2, 2),))),
]


@pytest.mark.parametrize("layout", ["mindspore-sync", "mindspore-async", "cann", "cann-op"])
@pytest.mark.parametrize("query", QUERIES)
def test_part_equals_the_filtered_whole(tmp_path, query, layout):
    if layout == "mindspore-sync":
        tree = grown(tmp_path)
        tree.tensor(1, 2, "Default/b-B/B-op0", ONES, graph=1)
        tree.complete(1, 2)
        tree.tensor(0, 5, "Default/b-B/B-op0", ONES)
        root = tree.root
    else:
        root = tmp_path
        for rank in (0, 1):
            cann = CannTree(root, layout, device=rank, rank=rank)
            for iteration in (1, 3):
                cann.operator(iteration, "Default/a-A/A-op0", {0: ONES}, {0: ONES})
                cann.complete(iteration)
    whole, part = walk(root), walk(root, query)
    assert part.problems == whole.problems == ()
    assert part.ranks == whole.ranks
    assert list(part.entries.where(query.keeps)) == list(filter(query.keeps, whole.entries))


def test_findings_cover_only_the_selected_part(tmp_path):
    """A rank that nobody asked for is neither missing nor unfinished."""
    tree = grown(tmp_path)
    tree.tensor(1, 4, "Default/a-A/A-op0", ONES)
    shutil.rmtree(tree.root / "rank_0" / "Net")
    assert (
        findings(walk(tree.root, Query(rank=1, iterations=IterationSelection("2", ((2, 2),)))))
        == ()
    )
    (unfinished,) = findings(walk(tree.root, Query(rank=1)))
    assert "iteration 4" in unfinished


def test_entry_columns_restore_every_entry(tmp_path):
    """Also what does not fit: numbers over 64 bits, digests and times of another form."""
    tree = grown(tmp_path, ranks=1, iterations=1)
    walked = list(walk(tree.root).entries)
    entry = walked[1]
    assert entry.record is not None
    record = entry.record
    strange = [
        entry,
        entry._replace(record=None),
        entry._replace(record=record._replace(digest="")),
        entry._replace(record=record._replace(digest="ABCD")),
        entry._replace(record=record._replace(digest=record.digest.upper())),
        entry._replace(record=record._replace(timestamp_us=7)),
        entry._replace(record=record._replace(path="elsewhere")),
        entry._replace(record=record._replace(bytes_in=1 << 80, bytes_stored=0)),
        entry._replace(stored_bytes=1 << 80),
        entry._replace(key=entry.key._replace(timestamp_us=1 << 65), record=None),
        entry._replace(relative="rank0/torch_api_dump/x.npy", record=None, member="input.0"),
    ]
    entries = Entries.of(tree.root, [walked[:1], strange])
    assert sorted(map(repr, entries)) == sorted(map(repr, [*walked[:1], *strange]))
    assert entries[0] == walked[0]
    assert entries[-1].key.timestamp_us == 1 << 65
    assert list(entries[1:3]) == list(entries)[1:3]
    assert entries[:0] == ()
