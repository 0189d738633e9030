"""Arrays of real MindSpore trees, dumped again through an agent: the same names and bytes.

What is not compared is excluded by one of the rules below and counted: known errors of the CPU
backend of those releases.
"""

from __future__ import annotations

import csv
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from rankdump._core.npy_format import parse_npy_header
from rankdump._core.plan import DumpPlan, OutputSettings
from rankdump._core.rank_identity import RankIdentity
from rankdump._layout import tree_paths as layout
from rankdump._layout.dump_folders import parse_tensor_path
from rankdump._layout.profile import PROFILES
from rankdump._layout.tree_paths import MAX_NAME_BYTES
from rankdump._session.rank_session import Session

GOLDEN = Path(__file__).parents[3] / "shared" / "golden" / "mindspore"
STAMP = re.compile(r"\.\d{16}\.(?=input|output)")
ORDER = "ms_execution_order_graph_"
HISTORY = "ms_global_execution_order_graph_"

TREES = {
    # tree: profile, and the number of files that the rules leave out
    "2.0.0-two-ranks": ("ms2.0", 0),
    "2.0.0-dtypes": ("ms2.0", 1),
    "2.7.0-two-ranks": ("ms2.4", 0),
    "2.7.0-three-graphs": ("ms2.4", 0),
    "2.7.0-dtypes": ("ms2.4", 5),
    "2.7.0-longname": ("ms2.4", 0),
}

# One history for all graphs of a process: each iteration stands in the file of one graph only,
# although every graph was dumped in it.
SHARED_HISTORY = {"2.7.0-three-graphs"}


def golden(tree: str) -> Path:
    path = GOLDEN / tree
    if not path.is_dir():
        pytest.skip("the golden trees are not beside this clone")
    return path


@dataclass(frozen=True)
class GoldenTensor:
    """One tensor of a golden tree."""

    path: Path
    relative: str
    """With the full name, where a mapping holds it."""
    data: bytes

    @property
    def key(self):
        key = parse_tensor_path(self.relative)
        assert key is not None, self.relative
        return key

    @property
    def unreadable(self) -> bool:
        """Whether the file has bfloat16 under a type name that numpy does not know."""
        return b"'<E2'" in self.data[:64]

    @property
    def left_out(self) -> bool:
        """Whether the file is unreadable, or that of an empty tensor, which has four
        stray bytes.
        """
        return self.unreadable or 0 in parse_npy_header(self.data).shape


def files_of(rank: Path) -> Iterator[GoldenTensor]:
    for path in sorted(rank.glob("*/*/*/*.npy")):
        mapping = path.parent / "mapping.csv"
        names = dict(rows_of(mapping)) if mapping.exists() else {}
        place = path.parent.relative_to(rank.parent)
        yield GoldenTensor(path, f"{place}/{names.get(path.name, path.name)}", path.read_bytes())


def rows_of(mapping: Path) -> list[list[str]]:
    with mapping.open(newline="") as file:
        return list(csv.reader(file))


def raw_names(rank: Path, graph: int) -> dict[str, str]:
    """Return full scope names by their spelling in file names, as far as the order has them."""
    return {
        layout.spell_operator("", name, profile): name
        for name in order_of(rank, graph)
        for profile in PROFILES.values()
    }


def order_of(rank: Path, graph: int) -> list[str]:
    path = rank / "execution_order" / f"{ORDER}{graph}.csv"
    return path.read_text().splitlines()[1:] if path.exists() else []


def graphs_of(rank: Path) -> list[int]:
    return [int(path.stem.removeprefix(ORDER)) for path in rank.glob(f"execution_order/{ORDER}*")]


def dump_again(rank: Path, number: int, world_size: int, plan: DumpPlan, address: str) -> None:
    """Pass every array of a rank to a session, in the order in which MindSpore wrote them."""
    identity = RankIdentity(number, world_size, number)
    session = Session(plan, identity=identity, agent=address)
    for graph in graphs_of(rank):
        session.graph(order_of(rank, graph), graph=graph)
    kept = [file for file in files_of(rank) if not file.unreadable]
    known = {graph: raw_names(rank, graph) for graph in {file.key.graph for file in kept}}
    for file in sorted(kept, key=lambda file: (file.key.iteration, file.key.timestamp_us)):
        key, array = file.key, np.load(file.path)
        if not key.constant:
            session.step(key.iteration)
            name = known[key.graph].get(key.op_name, key.op_name)
            session.dump(key.op_type, name, key.side.value, key.slot, array, graph=key.graph)
    session.close()
    for constants in constants_by_process([file for file in kept if file.key.constant]):
        with Session(plan, identity=identity, agent=address) as process:
            for file in constants:
                process.constant(file.key.op_name, np.load(file.path), graph=file.key.graph)


def constants_by_process(files: list[GoldenTensor]) -> list[list[GoldenTensor]]:
    """Return the first constant of each name, then the second, and so on: a process writes each
    name once.
    """
    by_name: dict[str, list[GoldenTensor]] = {}
    for file in files:
        by_name.setdefault(STAMP.sub(".", file.relative), []).append(file)
    copies = max(map(len, by_name.values()), default=0)
    return [[some[at] for some in by_name.values() if at < len(some)] for at in range(copies)]


def contents(rank: Path) -> Counter[tuple[str, bytes]]:
    """Count the files by full name without time stamp, and content."""
    kept = [file for file in files_of(rank) if not file.left_out]
    return Counter((STAMP.sub(".", file.relative), file.data) for file in kept)


@pytest.mark.parametrize("tree", TREES)
def test_golden_tree_dumped_again_is_identical(tree: str, make_agent, tmp_path: Path):
    """Names but for the time, bytes and execution order are equal, file by file."""
    origin, (profile, left_out) = golden(tree), TREES[tree]
    ranks = sorted(origin.glob("rank_*"))
    net_name = next(
        folder.name
        for folder in ranks[0].iterdir()
        if (folder / "0").exists() or (folder / "1").exists()
    )
    output = OutputSettings(str(tmp_path / "tree"), net_name, profile=profile, codec="none")
    address = make_agent().address
    for number, rank in enumerate(ranks):
        dump_again(rank, number, len(ranks), DumpPlan(output), address)
    for rank in ranks:
        ours = tmp_path / "tree" / rank.name
        assert contents(ours) == contents(rank)
        for path in sorted(rank.glob(f"execution_order/{ORDER}*")):
            assert (ours / "execution_order" / path.name).read_bytes() == path.read_bytes()
        for path in sorted(rank.glob(f"execution_order/{HISTORY}*")):
            if tree not in SHARED_HISTORY:
                again = (ours / "execution_order" / path.name).read_text()
                # Where two processes wrote into one rank, each added its own lines.
                assert numbers_of(again) == numbers_of(path.read_text())
        for folder in ours.rglob("mapping.csv"):
            assert_mapped(folder)
    assert sum(file.left_out for rank in ranks for file in files_of(rank)) == left_out


def numbers_of(history: str) -> list[str]:
    return list(dict.fromkeys(history.splitlines()))


def assert_mapped(mapping: Path) -> None:
    """Check that every row names an existing file, whose name a file system can hold."""
    rows = rows_of(mapping)
    assert rows
    for short, full in rows:
        assert (mapping.parent / short).is_file()
        assert len(os.fsencode(full)) > MAX_NAME_BYTES >= len(os.fsencode(short))
