"""`rankdump diff`: selection, output, files and exit codes."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from support.diff_reports import layered, report
from support.tree_builder import TreeBuilder

from rankdump._cli.command_group import run_command_line
from rankdump._core.record import TensorSide

NAMES = [f"Default/network-Net/fc{number}-Linear/Linear-op0" for number in range(4)]


def told(capsys, *arguments):
    """Return exit code, standard output and standard error of one command line."""
    code = run_command_line(["diff", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def grown(root, *, wrong_at=None, ranks=(0, 1), iterations=(0, 1), by=0.001):
    """A tree of four layers in a row; from one layer on its values are off."""
    tree = TreeBuilder(root)
    for rank in ranks:
        for iteration in iterations:
            values = np.linspace(-1, 1 + rank + iteration, 32, dtype=np.float32).reshape(4, 8)
            for at, name in enumerate(NAMES):
                tree.tensor(rank, iteration, name, values, side=TensorSide.INPUT)
                values = (values * np.float32(0.5)) + np.float32(by if at == wrong_at else 0)
                tree.tensor(rank, iteration, name, values)
            tree.complete(rank, iteration)
    return tree.root


@pytest.fixture
def a(tmp_path):
    return grown(tmp_path / "a", wrong_at=2)


@pytest.fixture
def b(tmp_path):
    return grown(tmp_path / "b")


def test_diff_names_the_origin_first(a, b, capsys):
    code, out, err = told(capsys, a, b)
    lines = out.splitlines()
    assert (code, err) == (1, "")
    assert lines[0] == "the difference starts at fc2/Linear-op0"
    assert lines[1] == "  rank 0-1, iteration 0, forward"
    assert f"a: {a}" in lines
    assert f"b: {b}" in lines
    assert "32 pairs of tensors: 12 different, 20 same" in lines
    (titles,) = (line for line in lines if line.split()[-4:] == ["mean", "abs", "cosine", "close"])
    assert titles.split()[:5] == ["rank", "iteration", "operator", "place", "verdict"]
    (marked, *_) = (line.split() for line in lines if line.startswith(">"))
    assert marked[:6] == [">", "0", "0", "fc2/Linear-op0", "input.0", "same"]
    assert all(len(line) <= 100 for line in lines[lines.index(titles) :])


def test_diff_of_equal_dumps_succeeds(a, capsys):
    code, out, _ = told(capsys, a, a)
    assert code == 0
    assert out.splitlines()[0] == "nothing differs"
    assert "32 pairs of tensors: 32 same" in out


def test_diff_names_the_own_rank_and_iteration_of_side_b(tmp_path, capsys):
    """Also of calls that only b has; rows keep the numbers of a, and a script can join both."""
    tree = TreeBuilder(tmp_path / "tree")
    for rank, iteration, bad in ((1, 5, 1.0), (0, 3, np.nan)):
        tree.tensor(rank, iteration, NAMES[0], np.ones(4, np.float32), side=TensorSide.INPUT)
        tree.tensor(rank, iteration, NAMES[0], np.array([1, bad], np.float32))
        if rank == 0:
            tree.tensor(rank, iteration, "Default/extra-Tanh/Tanh-op0", np.ones(2, np.float32))
        tree.complete(rank, iteration)
    numbers = ("--rank-a", "1", "--rank-b", "0", "--iteration-a", "5", "--iteration-b", "3")
    code, out, _ = told(capsys, tree.root, tree.root, *numbers)
    lines = out.splitlines()
    assert code == 1
    assert lines[:2] == [
        "NaN or infinity in b starts at fc0/Linear-op0",
        "  rank 0, iteration 3, forward",
    ]
    assert "only in b: 1 call: extra/Tanh-op0 (rank 0, iteration 3)" in lines
    assert sum(line.startswith(">") for line in lines) == 2
    found = json.loads(told(capsys, tree.root, tree.root, *numbers, "--json")[1])
    (suspect,) = next(each for each in found["origins"] if each["kind"] == "nonfinite")["suspects"]
    assert (suspect["rank"], suspect["iteration"], suspect["row_place"]) == (0, 3, [1, 5])


def test_diff_has_one_line_for_each_kind_of_tensor(tmp_path, capsys):
    """Batches of different sizes have no activation in common, but the same parameters."""
    roots = []
    for rows in (2, 4):
        tree = TreeBuilder(tmp_path / str(rows))
        tree.tensor(0, 0, NAMES[0], np.ones((rows, 8), np.float32), side=TensorSide.INPUT)
        tree.tensor(0, 0, NAMES[0], np.ones((rows, 4), np.float32))
        gradient = np.full(4, rows, np.float32)
        tree.tensor(0, 0, "Gradients/fc0.bias", gradient, op_type="Parameter")
        tree.tensor(0, 0, "fc0.bias", np.ones(4, np.float32), op_type="Parameter")
        tree.complete(0, 0, world_size=1)
        roots.append(tree.root)
    _, out, _ = told(capsys, *roots)
    parameters = next(at for at, line in enumerate(out.splitlines()) if "parameters" in line)
    assert out.splitlines()[parameters : parameters + 4] == [
        "parameters   1 pair: 1 same",
        "gradients    1 pair: 1 different; by at most 2 (fc0.bias, rank 0, iteration 0)",
        "activations  2 pairs: 2 shape; first extent 2 in a and 4 in b, as of other batch sizes",
        "",
    ]


def test_diff_applies_tolerances(a, b, capsys):
    assert told(capsys, a, b, "--atol", "0.01")[0] == 0
    code, out, _ = told(capsys, a, b, "--atol", "0", "--rtol", "1e-3")
    assert code == 1
    assert "normal is within 0 + 0.001 * |b|" in out


def test_diff_limits_rows(a, b, capsys):
    _, out, _ = told(capsys, a, b, "--limit", "4")
    assert "... 10 more rows: --limit 0 lists all that differ, --all every one" in out
    _, out, _ = told(capsys, a, b, "--limit", "0")
    table = out.partition("verdict")[2]
    assert sum("Linear-op0" in line and "put.0" in line for line in table.splitlines()) == 14
    _, out, _ = told(capsys, a, b, "--all")
    assert sum("Linear-op0" in line and "put.0" in line for line in out.splitlines()) >= 32


def test_diff_compares_parts_of_a_tree(a, b, capsys):
    """By options, and by the folder of a rank or an iteration."""
    for arguments in (
        (a, b, "--rank", "1", "--iteration", "1"),
        (a, b, "--rank-a", "1", "--rank-b", "1", "--iteration", "1"),
        (a / "rank_1", b / "rank_1", "--iteration", "1"),
        (a / "rank_1" / "Net" / "0" / "1", b / "rank_1" / "Net" / "0" / "1"),
    ):
        code, out, err = told(capsys, *arguments)
        assert (code, err) == (1, ""), arguments
        assert "8 pairs of tensors: 3 different, 5 same" in out
        assert "  rank 1, iteration 1, forward" in out
    code, out, _ = told(capsys, a, b, "--operator", "*fc0*")
    assert (code, "8 pairs of tensors: 8 same" in out) == (0, True)
    code, out, _ = told(capsys, a, b, "--side", "output")
    assert "16 pairs of tensors" in out


def test_diff_compares_iterations_and_ranks_of_one_tree(b, capsys):
    code, out, _ = told(capsys, b, b, "--iteration-a", "0", "--iteration-b", "1", "--rank", "0")
    assert (code, "8 pairs of tensors: 8 different" in out) == (1, True)
    code, out, _ = told(capsys, b / "rank_0", b / "rank_1", "--iteration", "0")
    assert (code, "8 pairs of tensors: 8 different" in out) == (1, True)
    # Values grow by rank as by iteration.
    first, second = ["--rank-a", "0", "--iteration-a", "1"], ["--rank-b", "1", "--iteration-b", "0"]
    assert told(capsys, b, b, *first, *second)[0] == 0


def test_diff_rejects_a_path_that_contradicts_an_option(a, b, capsys):
    code, out, err = told(capsys, a / "rank_1", b, "--rank", "0")
    assert (code, out, err) == (2, "", "rankdump: A is the folder of rank 1 alone\n")
    folder = b / "rank_1" / "Net" / "0" / "1"
    code, _, err = told(capsys, a, folder, "--iteration", "0|2-3")
    assert (code, err) == (2, "rankdump: B is the folder of iteration 1 alone\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rtol", "-1"], "rtol"),
        (["--match", "exact,guess"], "guess"),
        (["--iteration", "x"], "'x' is not allowed"),
        (["--rank", "7"], "7 is not allowed; allowed: 0, 1"),
        (["--html", "nowhere/page.html"], "nowhere/page.html: its folder does not exist"),
        (["--map", "nowhere.csv"], "nowhere.csv"),
    ],
)
def test_diff_rejects_wrong_usage_in_one_line(a, b, capsys, arguments, says):
    code, out, err = told(capsys, a, b, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("rankdump: ")
    assert says in err
    assert err.count("\n") == 1


def test_diff_of_another_folder_is_an_error(a, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    code, _, err = told(capsys, a, tmp_path / "empty")
    assert (code, err.count("\n")) == (1, 1)
    assert "not a dump tree" in err


def test_diff_prints_one_json_object(a, b, capsys):
    """One object, and nothing beside it, whatever else is written."""
    folder = a.parent / "tables"
    code, out, err = told(capsys, a, b, "--json", "--csv", folder)
    assert (code, err) == (1, "")
    found = json.loads(out)
    assert found["origins"][0]["suspects"][0]["name_a"] == NAMES[2]
    assert found["counts"]["different"] == 12
    assert len(found["rows"]) == 32
    assert (folder / "ts_api_forward_compare_0.csv").exists()


def test_diff_writes_tables(a, b, tmp_path, capsys):
    folder = tmp_path / "tables"
    code, out, _ = told(capsys, a, b, "--rank", "0", "--csv", folder)
    assert code == 1
    assert f"4 tables written to {folder}" in out
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        f"ts_api_{kind}_{iteration}.csv"
        for kind in ("forward_compare", "mapping")
        for iteration in (0, 1)
    ]
    assert '"False"' in (folder / "ts_api_forward_compare_1.csv").read_text()


def test_diff_writes_a_page(a, b, tmp_path, capsys):
    page = tmp_path / "page.html"
    code, out, _ = told(capsys, a, b, "--html", page)
    assert (code, out.splitlines()[-1]) == (1, f"{page} written")
    assert NAMES[2] in page.read_text()
    closed = tmp_path / "closed.html"
    closed.mkdir()
    assert told(capsys, a, b, "--html", closed)[0] == 2


def test_diff_without_bokeh_fails_before_the_comparison(a, b, tmp_path, capsys, monkeypatch):
    """One line, before any work is done."""
    monkeypatch.setitem(sys.modules, "bokeh", None)
    for name in [
        name
        for name in sys.modules
        if name.startswith(("bokeh.", "rankdump._analysis.compare.html_page"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    code, out, err = told(capsys, a, b, "--html", tmp_path / "page.html")
    assert (code, out) == (2, "")
    assert err.startswith("rankdump: --html needs bokeh, pip install 'rankdump[report]'")


def test_diff_passes_its_options_to_compare(a, b, tmp_path, capsys, monkeypatch):
    """Every option means what `rankdump.compare` calls by its name."""
    asked = {}

    def compare(*places, progress, **options):
        progress(1, 2)
        asked.update(options)
        return report(layered())

    names = tmp_path / "names.csv"
    names.write_text("x,y\n")
    monkeypatch.setattr("rankdump._cli.diff_report.compare", compare)
    told(
        capsys,
        *(a, b, "--equal-nan", "--match", "exact,sequence", "--map", names, "--msaccucmp"),
        *("--unshard", "--noise", b, "--iteration", "0|2-3"),
        *("--processes", "3", "--dask", "tcp://host:1"),
        *("--rtol", "0.5", "--attempt", "1", "--attempt-b", "2"),
        *("--tolerance", "*fc*=1e-3", "--tolerance", "*=rounding"),
    )
    assert asked == {
        "rank": None,
        "graph": None,
        "rank_a": None,
        "rank_b": None,
        "iteration": "0|2-3",
        "iteration_a": None,
        "iteration_b": None,
        "attempt": 1,
        "attempt_a": None,
        "attempt_b": 2,
        "operator": None,
        "side": None,
        "rtol": 0.5,
        "atol": None,
        "equal_nan": True,
        "match": "exact,sequence",
        "mapping": names,
        "msaccucmp": True,
        "processes": 3,
        "dask": "tcp://host:1",
        "unshard": True,
        "noise": (b,),
        "tolerance": {"*fc*": 0.001, "*": "rounding"},
    }


@pytest.mark.parametrize("text", ["0.1", "=0.1", "*fc*=much", "*fc*="])
def test_diff_rejects_a_tolerance_without_pattern_or_number(tmp_path, capsys, text):
    code, _, err = told(capsys, tmp_path, tmp_path, "--tolerance", text)
    assert code == 2
    assert f"{text!r} is not allowed; allowed: PATTERN=ERROR, such as '*norm*=1e-3'" in err


def test_diff_rejects_a_tolerance_below_zero_and_one_that_matches_nothing(a, b, capsys):
    for text, value in (("*=-1", "-1.0"), ("*missing*=1", "'*missing*'")):
        code, _, err = told(capsys, a, b, "--tolerance", text)
        assert code == 2
        assert f"{value} is not allowed" in err


def test_diff_names_the_largest_error_of_all_ranks(tmp_path, capsys):
    """The headline names both ranks, so its error is that of the rank that is apart the most."""
    roots = []
    for off in (0.0, 1.0):
        tree = TreeBuilder(tmp_path / f"off{off}")
        for rank in (0, 1, 2):
            by = np.float32(off * (0.5 if rank == 1 else 0.1))
            tree.tensor(rank, 0, NAMES[0], np.ones(4, np.float32), side=TensorSide.INPUT)
            tree.tensor(rank, 0, NAMES[0], np.ones(4, np.float32) + by)
            tree.tensor(rank, 0, "fc0.weight", np.zeros(4, np.float32) + by, op_type="Parameter")
            tree.complete(rank, 0, world_size=3)
        roots.append(tree.root)
    lines = told(capsys, *roots)[1].splitlines()
    assert lines[1] == "  rank 0-2, iteration 0, forward"
    assert "output.0 differs by at most 0.5;" in lines[2]
    assert "fc0.weight differs too by at most 0.5 " in lines[2]
    assert "the same on ranks 1-2" in lines[2]


def test_diff_mentions_different_types_first(tmp_path, capsys):
    """Also where all numbers are the same, and beside what differs."""
    roots = []
    for dtype, by in (("float32", 0.0), ("float16", 0.0), ("float16", 1.0)):
        tree = TreeBuilder(tmp_path / f"{dtype}{by}")
        values = np.arange(4).astype(dtype)
        tree.tensor(0, 0, NAMES[0], values, side=TensorSide.INPUT)
        tree.tensor(0, 0, NAMES[0], values + np.array(by, dtype))
        tree.complete(0, 0, world_size=1)
        roots.append(tree.root)
    code, out, _ = told(capsys, roots[0], roots[1])
    first, second, *_ = out.splitlines()
    assert (code, first) == (0, "no value differs")
    assert second.startswith("types differ in 2 pairs of tensors, first float32 against float16")
    assert second.endswith(f"input.0 of {NAMES[0]}, rank 0, iteration 0, forward")
    code, out, _ = told(capsys, roots[0], roots[2])
    assert code == 1
    assert "output.0 differs by at most 1 (dtype float32 against float16" in out
    assert any(line.startswith("types differ in 2 pairs") for line in out.splitlines()[:6])


def test_diff_states_that_nothing_was_compared(tmp_path, capsys):
    """No call has a partner: that is no answer to where the two part."""
    roots = []
    for name in ("Default/x-Relu/Relu-op0", "Default/y-Conv/Conv-op0"):
        tree = TreeBuilder(tmp_path / name.rpartition("/")[2])
        tree.tensor(0, 0, name, np.ones(4, np.float32))
        tree.complete(0, 0, world_size=1)
        roots.append(tree.root)
    code, out, _ = told(capsys, *roots, "--match", "exact")
    assert code == 1
    assert out.splitlines()[0] == "nothing was compared: 2 tensors without a partner"


def write_two_jobs(root):
    """The same job two times in one tree; the second one has the values of `grown`."""
    for job, clock_us in (("1", 1_700_000_000_000_000), ("2", 1_800_000_000_000_000)):
        tree = TreeBuilder(root, job=job, clock_us=clock_us)
        for name in NAMES:
            tree.tensor(0, 0, name, np.full((4, 8), int(job), np.float32))
        tree.complete(0, 0, world_size=1, session=f"session{job}")
    return root


def test_last_of_two_jobs_is_compared(tmp_path, capsys):
    both = write_two_jobs(tmp_path / "both")
    last = TreeBuilder(tmp_path / "last")
    for name in NAMES:
        last.tensor(0, 0, name, np.full((4, 8), 2, np.float32))
    last.complete(0, 0, world_size=1)
    code, out, _ = told(capsys, both, last.root)
    lines = out.splitlines()
    assert code == 0
    assert f"a: {both} (the last of 2 jobs: --job-a selects another)" in lines
    assert "4 pairs of tensors: 4 same" in lines
    code, out, _ = told(capsys, last.root, both, "--noise", both)
    assert f"b: {both} (the last of 2 jobs: --job-b selects another)\n" in out
    assert f"{both} (the last of 2 jobs)" in out.replace("\n  ", " ")
    code, out, _ = told(capsys, both, both, "--job-a", "1")
    assert code == 1
    assert "4 pairs of tensors: 4 different" in out
    assert f"a: {both}\n" in out
