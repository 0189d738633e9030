"""Jobs with plain arrays through a real agent, and the resulting tree."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rankdump
from rankdump._core.plan import (
    ContentSettings,
    DumpPlan,
    IterationSelection,
    OperatorSelection,
    OutputSettings,
    SavedDataMode,
    TensorSelection,
)

INPUTS = [np.arange(1, 7, dtype="f4").reshape(2, 3), np.arange(7, 13, dtype="f4").reshape(2, 3)]
SUM = INPUTS[0] + INPUTS[1]
CONV1 = "Default/network-Net/conv1-Conv2d/Conv2d-op0"
CONV2 = "Default/network-Net/conv2-Conv2d/Conv2d-op0"


def a_plan(
    root: Path,
    *,
    profile: str = "ms2.3",
    saved: SavedDataMode = "tensor",
    sample_elements: int = 0,
    selection: TensorSelection | None = None,
) -> DumpPlan:
    return DumpPlan(
        output=OutputSettings(str(root), profile=profile, codec="none"),
        selection=selection or TensorSelection(),
        content=ContentSettings(saved=saved, sample_elements=sample_elements),
    )


class ArrayJob:
    """Opens sessions of rank 0 on one agent; has the path of the tree."""

    def __init__(self, root: Path, address: str) -> None:
        self.root = root
        self.address = address

    def __call__(self, **settings) -> rankdump.Session:
        return rankdump.Session(a_plan(self.root, **settings), agent=self.address)


@pytest.fixture
def start(make_agent, short_dir) -> ArrayJob:
    return ArrayJob(short_dir / "dump", make_agent().address)


def add(session: rankdump.Session, name: str = "Default/Add-op0") -> None:
    for slot, array in enumerate(INPUTS):
        session.dump("Add", name, "input", slot, array)
    session.dump("Add", name, "output", 0, SUM)


def files(root: Path, iteration: int | str = 0, pattern: str = "*.npy") -> list[Path]:
    """Return the files of an iteration, in the order in which they were dumped."""
    found = (root / f"rank_0/Net/0/{iteration}").glob(pattern)
    return sorted(found, key=lambda path: path.name.split(".")[-6:-4])


def rows(root: Path, iteration: int = 0) -> list[list[str]]:
    with (root / f"rank_0/Net/0/{iteration}/statistic.csv").open(newline="") as file:
        return [row[10:13] for row in csv.reader(file)][1:]


@pytest.mark.parametrize(("saved", "count"), [("statistic", 0), ("full", 3)])
def test_statistics_of_an_addition_equal_mindspores(start, saved, count):
    """Statistics computed by rank and agent equal those of MindSpore's own test."""
    with start(saved=saved) as session:
        add(session)
    assert rows(start.root) == [
        ["6", "1", "9.53939"],
        ["12", "7", "23.6432"],
        ["18", "8", "32.9242"],
    ]
    assert len(files(start.root)) == count


def test_sample_is_the_content_of_the_file(start):
    with start(sample_elements=4) as session:
        add(session)
    for path, array in zip(files(start.root), [*INPUTS, SUM], strict=True):
        np.testing.assert_array_equal(np.load(path), array.ravel()[:4])


def test_only_the_overflow_is_in_the_tree(start):
    selection = TensorSelection(trigger="overflow", overflow_limit=1)
    with start(selection=selection) as session:
        for iteration in range(3):
            session.step(iteration)
            add(session)
            session.dump("Div", f"Default/Div-op{iteration}", "input", 0, SUM)
            session.dump("Div", f"Default/Div-op{iteration}", "output", 0, SUM * np.inf)
    names = [p.name.split(".")[1] for p in start.root.rglob("*.npy")]
    assert names == ["Default_Div-op0"] * 2


def test_inputs_of_the_operator_that_raised_are_in_the_tree(start):
    def job() -> None:
        with start(selection=TensorSelection(trigger="exception")) as session:
            for iteration in range(3):
                session.step(iteration)
                add(session)
            session.dump("Div", "Default/Div-op0", "input", 0, SUM)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        job()
    (path,) = start.root.rglob("*.npy")
    assert path.parent.name == "2"
    np.testing.assert_array_equal(np.load(path), SUM)


RAISING = """
import sys
import numpy as np
import rankdump
from rankdump._core.plan import DumpPlan, OutputSettings, TensorSelection

output = OutputSettings(sys.argv[1], codec="none")
plan = DumpPlan(output, TensorSelection(trigger="exception"))
session = rankdump.Session(plan, agent=sys.argv[2])
session.dump("Add", "Default/Add-op0", "input", 0, np.ones(1))
session.dump("Div", "Default/Div-op0", "input", 0, np.ones(1))
{ending}
"""


@pytest.mark.parametrize(("ending", "kept"), [("1 / 0", ["Default_Div-op0"]), ("", [])])
def test_dead_script_leaves_the_operator_that_raised(start, ending, kept):
    """The session need not be closed: at the end of the interpreter the cause is reported."""
    command = [sys.executable, "-c", RAISING.format(ending=ending), str(start.root), start.address]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ("ZeroDivisionError" in done.stderr) is bool(kept)
    assert [path.name.split(".")[1] for path in start.root.rglob("*.npy")] == kept


def test_dump_start_selects_iterations_outside_the_plan(start):
    """The agent admits iterations for which the script itself enabled dumping."""
    selection = TensorSelection(iterations=IterationSelection("9", ((9, 9),)))
    with start(selection=selection) as session:
        for iteration in range(4):
            session.step(iteration)
            if iteration == 1:
                session.dump_start()
            add(session)
            if iteration == 2:
                session.dump_stop()
    folders = sorted(p.name for p in (start.root / "rank_0/Net/0").iterdir())
    assert folders == ["1", "2"]
    assert [len(files(start.root, i)) for i in (1, 2)] == [3, 3]


def test_iterations_count_from_the_initial_iteration(start):
    selection = TensorSelection(
        initial_iteration=100, iterations=IterationSelection("101", ((101, 101),))
    )
    with start(selection=selection) as session:
        for iteration in range(3):
            session.step(iteration)
            add(session)
    assert [p.name for p in (start.root / "rank_0/Net/0").iterdir()] == ["101"]


def test_constants_are_stored_once_in_their_own_folder(start):
    with start() as session:
        session.constant("data-1", np.ones(3))
        for iteration in range(2):
            session.step(iteration)
            session.constant("data-1", np.ones(3))
            add(session)
    (path,) = (start.root / "rank_0/Net/0/constants").glob("*.npy")
    assert path.name.startswith("Parameter.data-1.0.0.")
    assert (len(files(start.root, 0)), len(files(start.root, 1))) == (3, 3)


@pytest.mark.parametrize("given", [True, False])
def test_compiled_order_replaces_the_observed_one(start, given):
    with start() as session:
        if given:
            session.graph([CONV2, CONV1])
        for name in (CONV1, CONV2):
            session.dump("Conv2d", name, "output", 0, SUM)
    order = (start.root / "rank_0/execution_order/ms_execution_order_graph_0.csv").read_text()
    expected = [CONV2, CONV1] if given else [CONV1, CONV2]
    assert order.splitlines()[1:] == expected


def test_graph_has_the_source_line_of_an_operator(start):
    with start() as session:
        add(session)
    text = (start.root / "rank_0/graphs/ms_output_trace_code_graph_0.ir").read_text()
    assert "# Fullname with scope: (Default/Add-op0)" in text
    assert f"# In file {__file__}:" in text


def test_short_names_of_the_old_profile_do_not_collide(start):
    with start(profile="ms2.0") as session:
        for name in (CONV1, CONV2):
            session.dump("Conv2d", name, "output", 0, SUM)
        session.dump("Parameter", "conv1.weight", "output", 0, SUM)
    names = sorted(path.name.split(".0.0.")[0] for path in files(start.root))
    assert names == ["Conv2d.Conv2d-op0", "Conv2d.Conv2d-op1", "Parameter.conv1.weight"]


def test_unmatched_kernels_are_notes_of_the_session(start, caplog):
    operators = OperatorSelection(everything=False, types=("add", "conv"))
    with start(selection=TensorSelection(operators=operators)) as session:
        add(session)
    assert "Unused Kernel in json: conv" in caplog.text
    assert "Unused Kernel in json: add" not in caplog.text


@pytest.mark.parametrize("saved", ["tensor", "statistic", "full"])
def test_manifest_is_balanced_in_every_mode(start, saved):
    """The manifest of an iteration accounts for every tensor that the plan selects."""
    with start(saved=saved) as session:
        add(session)
        session.dump("Complex", "Default/Complex-op0", "output", 0, np.ones(2, "c8"))
        session.dump("Print", "Default/Print-op0", "input", 0, np.array(["text"]))
    (manifest,) = (start.root / "rank_0/.dump_metadata/manifest").glob("*.json")
    status = json.loads(manifest.read_text())["status"]
    lost = {"unsupported_dtype": 1} | ({"no_statistics": 1} if saved == "statistic" else {})
    assert status["expected"] == 5
    assert status["dropped"] == lost
    assert status["stored"] == 5 - len(lost)
