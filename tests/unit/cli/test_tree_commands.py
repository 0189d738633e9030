from __future__ import annotations

import json

import numpy as np
import pytest
from support.tensor_layouts import shard_rows
from support.tree_builder import TreeBuilder

from rankdump._cli.command_group import run_command_line
from rankdump._cli.tree_contents import describe_entries, format_overview
from rankdump._core.drop_reasons import describe_drops
from rankdump._core.record import TensorSide
from rankdump.reader import walk

VALUES = np.array([[1.0, -2.0, 0.0], [np.inf, 3.0, np.nan]], np.float32)


def told(capsys, *arguments):
    """Return exit code, standard output and standard error of one command line."""
    code = run_command_line([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def grown(tree):
    """Two ranks, two iterations, two operators each."""
    for rank in (0, 1):
        for iteration in (0, 1):
            for number in (0, 1):
                name = f"Default/network-Net/layers-ModuleList/fc{number}-Linear/Linear-op{number}"
                tree.tensor(rank, iteration, name, VALUES, side=TensorSide.INPUT, slot=number)
                tree.tensor(rank, iteration, name, VALUES, dtype="bfloat16")
            tree.complete(rank, iteration)
    return tree


def test_ls_begins_with_an_overview(grown, capsys):
    """Without a filter: one line per rank and iteration, the first tensors, and the total."""
    code, out, _ = told(capsys, "ls", grown.root)
    lines = out.splitlines()
    assert code == 0
    assert [line.split()[:2] for line in lines[1:5]] == [
        ["0", "0"],
        ["0", "1"],
        ["1", "0"],
        ["1", "1"],
    ]
    assert all(line.endswith("complete") for line in lines[1:5])
    assert "first 10 tensors:" in lines
    assert any(line.startswith("... 6 more tensors") for line in lines)
    assert lines[-1].startswith(f"{grown.root}: 16 tensors of 2 ranks in 2 iterations, ")


def test_ls_digest_marks_equal_tensors(grown, capsys):
    """Same bytes, type and shape have one mark; what stands alone or is unknown has none."""
    grown.tensor(1, 2, "Default/Only-op0", VALUES + 1)
    grown.complete(1, 2)
    grown.tensor(1, 3, "Default/Unfinished-op0", VALUES)
    code, out, _ = told(capsys, "ls", grown.root, "--digest", "--limit", 0)
    cells = [line.split() for line in out.splitlines() if "-op" in line]
    held = json.loads(told(capsys, "ls", grown.root, "--json")[1])["tensors"]
    assert code == 0
    same = [line for line in cells if line[-1] in ("=1", "=2")]
    assert [line[-2] for line in same] == [tensor["digest"][:12] for tensor in held[:16]]
    by_type = {(tensor["dtype"], line[-1]) for tensor, line in zip(held, same, strict=False)}
    assert by_type == {("float32", "=1"), ("bfloat16", "=2")}
    assert [line[-1] for line in cells[16:]] == [held[16]["digest"][:12], "-"]
    assert "16 tensors with a mark, 2 different" in out.splitlines()


def test_ls_digest_marks_tensors_beyond_the_limit(grown, capsys):
    """A mark says that there is another one, listed or not; without the option there is none."""
    _, out, _ = told(capsys, "ls", grown.root, "--digest", "--rank", 1, "--limit", 1)
    (line,) = (line for line in out.splitlines() if "Linear-op0" in line)
    assert line.endswith("=1")
    assert "=1" not in told(capsys, "ls", grown.root, "--rank", 1)[1]


@pytest.mark.parametrize(
    ("options", "count"),
    [
        (["--rank", "1"], 8),
        (["--rank", "7"], 0),
        (["--iteration", "1"], 8),
        (["--iteration", "0|1-3"], 16),
        (["--op", "*fc1*"], 8),
        (["--op", "Default/network-Net/layers-ModuleList/fc0-Linear/Linear-op0"], 8),
        (["--op", "Linear"], 16),
        (["--op-regex", r"fc[1-9]-"], 8),
        (["--op-regex", "^fc1"], 0),
        (["--op-regex", r"Linear-op\d$", "--op", "*fc0*"], 8),
        (["--graph", "0"], 16),
        (["--graph", "1"], 0),
        (["--side", "input", "--rank", "0", "--iteration", "0"], 2),
    ],
)
def test_ls_filters(grown, capsys, options, count):
    """Every filter narrows, and they narrow together."""
    code, out, _ = told(capsys, "ls", grown.root, "--json", *options)
    body = json.loads(out)
    assert code == 0
    assert len(body["tensors"]) == body["tensor_count"] == count
    code, out, _ = told(capsys, "ls", grown.root, *options)
    assert f": {count} tensors of" in out


def test_ls_json_has_every_field_of_a_tensor(grown, capsys):
    """A script gets raw names, the original type, and the path to open."""
    _, out, _ = told(capsys, "ls", grown.root, "--json", "--side", "output", "--limit", "1")
    (tensor,) = json.loads(out)["tensors"]
    assert tensor["op_name"] == "Default/network-Net/layers-ModuleList/fc0-Linear/Linear-op0"
    assert (tensor["dtype"], tensor["shape"], tensor["codec"]) == ("bfloat16", [2, 3], "zstd")
    assert (grown.root / tensor["path"]).is_file()


def test_ls_prints_module_names(grown, capsys):
    """Modules by their own names, the operator last, so that a line holds them."""
    _, out, _ = told(capsys, "ls", grown.root, "--rank", "0", "--iteration", "0")
    assert "layers.fc1/Linear-op1" in out
    assert all(len(line) <= 100 for line in out.splitlines()[:-2])


def test_ls_lists_choices_when_nothing_matches(grown, capsys):
    """An empty answer names what could be asked for; it is no failure."""
    code, out, _ = told(capsys, "ls", grown.root, "--rank", "7")
    assert code == 0
    assert "no tensor matches; the tree has rank 0-1, graph 0, iteration 0-1, 2 operators: " in out
    assert "layers.fc0/Linear-op0" in out


def test_ls_shows_constants_beside_iterations(grown, capsys):
    """They have a line of their own, and no iteration in JSON."""
    grown.tensor(0, 0, "mask", VALUES, op_type="Parameter", constant=True)
    _, out, _ = told(capsys, "ls", grown.root)
    assert out.splitlines()[1].split()[:2] == ["0", "constants"]
    assert "rank 0, constants, net Net, graph 0" in out
    _, out, _ = told(capsys, "ls", grown.root, "--json", "--op", "Parameter")
    (tensor,) = json.loads(out)["tensors"]
    assert tensor["iteration"] is None
    _, out, _ = told(capsys, "ls", grown.root, "--op", "Parameter", "--iteration", "0")
    assert ": 0 tensors of" in out


def test_ls_of_statistics_only_refers_to_stats(tree, capsys):
    """A tree of tables holds no tensor, and is no failure."""
    table = tree.row(0, 0, "Default/a-A/A-op0", VALUES)
    tree.complete(0, 0, world_size=1)
    code, out, _ = told(capsys, "ls", tree.root)
    taken = table.stat().st_size
    assert code == 0
    assert "no tensor files" in out
    assert f"statistics in 1 statistic.csv file, {taken} B on disk: see rankdump stats" in out
    assert json.loads(told(capsys, "ls", tree.root, "--json")[1])["table_bytes"] == taken


def test_status_counts_the_bytes_of_tables(tree, capsys):
    """The bytes on disk of an iteration without files are those of its tables."""
    tables = [tree.row(0, step, "Default/a-A/A-op0", VALUES) for step in (0, 1)]
    for step in (0, 1):
        tree.complete(0, step, world_size=1)
    sizes = [table.stat().st_size for table in tables]
    body = json.loads(told(capsys, "status", tree.root, "--json")[1])
    assert [iteration["bytes_stored"] for iteration in body["iterations"]] == sizes
    assert f"{sum(sizes)} B" in told(capsys, "status", tree.root)[1]


def test_ls_names_missing_ranks_and_unfinished_iterations(grown, capsys):
    """Missing ranks and unfinished iterations are named; they are no damage."""
    grown.tensor(0, 2, "Default/x-X/X-op0", VALUES)
    grown.complete(1, 1, world_size=4)
    code, out, _ = told(capsys, "ls", grown.root)
    assert code == 0
    assert "rank 2-3: no folder, in a job with world size 4" in out
    assert "rank 0: iteration 2 has tensors but no manifest" in out
    assert "incomplete" in out


def test_ls_of_another_tools_tree_does_not_call_it_incomplete(tree, capsys):
    tree.tensor(0, 2, "Default/x-X/X-op0", VALUES)
    code, out, _ = told(capsys, "ls", tree.root)
    assert code == 0
    assert "unknown" in out.splitlines()[1]
    assert out.endswith("no manifests, so it is not known whether tensors are missing\n")


def test_ls_reports_damage_and_continues(grown, capsys):
    """A tensor that no manifest describes is opened; when it is damaged the code says so."""
    path = grown.tensor(0, 3, "Default/x-X/X-op0", VALUES)
    path.write_bytes(b"\x28\xb5\x2f\xfd broken")
    code, out, err = told(capsys, "ls", grown.root, "--iteration", "3")
    assert code == 1
    assert "damaged" in out
    assert f"{path}: damaged: zstd frame" in err


def test_ls_prints_one_line_per_rank_for_many_iterations(tree):
    """Ten thousand tensors do not become ten thousand lines."""
    for rank in range(3):
        for iteration in range(20):
            tree.tensor(rank, iteration, "Default/a-A/A-op0", VALUES)
            if (rank, iteration) != (2, 19):
                tree.complete(rank, iteration, world_size=3)
    lines = format_overview(walk(tree.root), width=100)
    assert [line.split()[1] for line in lines[1:]] == ["0-19", "0-19", "0-19"]
    assert lines[-1].endswith("incomplete: 19")
    assert len(describe_entries(walk(tree.root).entries)) == 60


def test_show_prints_shape_types_and_statistics(grown, capsys):
    """Both types, every figure and the first values of one tensor."""
    path = next(e for e in walk(grown.root).entries if e.key.side is TensorSide.OUTPUT).path
    code, out, _ = told(capsys, "show", path)
    said = dict(line.split(":", 1) for line in out.splitlines())
    facts = {name: value.strip() for name, value in said.items()}
    assert code == 0
    assert facts["shape"] == "(2,3)"
    assert (facts["dtype"], facts["stored dtype"]) == ("bfloat16", "float32")
    assert (facts["nans"], facts["infinities"], facts["zeros"]) == ("1", "1", "1")
    assert facts["rank"] == "0"
    assert facts["first values"] == "1.0, -2.0, 0.0, inf, 3.0, nan"


def test_show_json_is_valid_with_nan(grown, capsys):
    """NaN and infinity are words in JSON, not broken numbers."""
    path = walk(grown.root).entries[0].path
    _, out, _ = told(capsys, "show", path, "--json")
    body = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert body["statistics"]["maximum"] == "nan"
    assert body["first_values"] == [1.0, -2.0, 0.0, "inf", 3.0, "nan"]


def test_show_reads_files_outside_a_tree(tmp_path, capsys):
    """Any npy file will do."""
    np.save(tmp_path / "own.npy", np.arange(4))
    code, out, _ = told(capsys, "show", tmp_path / "own.npy")
    assert code == 0
    assert "first values: 0, 1, 2, 3" in out


@pytest.mark.parametrize(
    ("name", "data"),
    [("a.npy", b"junk"), ("a.npy.zst", b"junk"), ("a.npy", b""), ("a.txt", b"text")],
)
def test_show_reports_damage_in_one_line(tmp_path, capsys, name, data):
    """A damaged file is exit code 1 and one line, never a traceback."""
    (tmp_path / name).write_bytes(data)
    code, out, err = told(capsys, "show", tmp_path / name)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert name in err


def test_status_of_a_tree_needs_no_daemon(grown, capsys):
    """The manifests alone give the balance of every rank."""
    code, out, _ = told(capsys, "status", grown.root)
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert rows[1][:4] == ["0", "closed", "2/2", "8"]
    assert rows[3][:3] == ["all", "4/4", "16"]
    code, out, _ = told(capsys, "status", grown.root, "--json")
    body = json.loads(out)
    assert [session["state"] for session in body["sessions"]] == ["closed", "closed"]
    assert sum(i["stored"] for i in body["iterations"]) == 16


def test_status_of_an_unbalanced_tree_fails(grown, capsys):
    """A tensor that nobody accounts for is exit code 1, and said."""
    grown.complete(0, 0, expected=99)
    code, out, _ = told(capsys, "status", grown.root)
    assert code == 1
    assert "not every expected tensor is accounted for" in out


def test_status_of_a_tree_of_statistics_without_manifests(tmp_path, capsys):
    """No daemon is asked: that no session is open would say nothing of a tree."""
    folder = tmp_path / "rank0"
    folder.mkdir()
    (folder / "torch_api_dump_info.pkl").write_text("")
    code, out, _ = told(capsys, "status", tmp_path)
    assert (code, "session" in out) == (0, False)
    assert (
        "the tree has no manifest and no iteration with tensors: rankdump ls lists what it contains"
        in out
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "No such command"),
        (["ls", "/nowhere/at/all"], "does not exist"),
        (["ls", ".", "--iteration", "0,2"], 'allowed: "all"'),
        (["ls", ".", "--side", "left"], "input"),
        (["ls", ".", "--op-regex", "["], "is not a regular expression"),
        (["stats", ".", "--sort", "colour"], "l2norm"),
        (["stats", "/nowhere/at/all"], "does not exist"),
        (["find-source", "."], "Missing argument"),
        (["show"], "Missing argument"),
        (["status", "--json", "--watch"], "cannot be combined"),
        (["status", ".", "--agent", "unix:x"], "cannot be combined"),
        (["status", "--job", "j", "--agent", "unix:x"], "cannot be combined"),
        (["run"], "Missing argument"),
        (["run", "--output", ".", "--", "true"], "give --config"),
        (["run", "--config", "/nowhere.json", "--", "true"], "/nowhere.json"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(capsys, arguments, words):
    """Whoever mistypes reads one line that says what is allowed."""
    code, out, err = told(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_unavailable_daemon_is_code_3(tmp_path, capsys):
    """No daemon is told apart from wrong input."""
    agent, coordinator = ("status", "--agent"), ("status", "--coordinator")
    for command in (agent, coordinator, ("order", "--coordinator"), ("hints", "--coordinator")):
        code, _, err = told(capsys, *command, f"unix:{tmp_path}/none.sock")
        assert (code, err.count("\n")) == (3, 1)
        assert "none.sock" in err


def test_ls_and_show_have_the_part_of_a_shard(tree, capsys):
    """Columns of micro-batch, phase and layout appear where a tensor of the listing has them."""
    tree.tensor(0, 0, "fc/A-op0", VALUES)
    assert "  layout" not in told(capsys, "ls", tree.root)[1]
    path = tree.tensor(
        1,
        0,
        "fc/Linear-op0",
        VALUES,
        tensor_layout=shard_rows(1, 2, (4, 3)),
        microbatch=3,
        phase="eval",
    )
    tree.complete(0, 0)
    tree.complete(1, 0)
    _, out, _ = told(capsys, "ls", tree.root, "--limit", 0)
    titles = [line.split() for line in out.splitlines() if line.startswith("operator")]
    assert titles[0][-3:] == ["micro-batch", "phase", "layout"]
    (line,) = (line for line in out.splitlines() if "Linear-op0" in line)
    assert line.endswith("3            eval   dp 1/2 Shard(0) of [4, 3]")
    held = json.loads(told(capsys, "ls", tree.root, "--json")[1])["tensors"]
    assert "layout" not in held[0]
    assert held[1]["microbatch"] == 3
    assert held[1]["phase"] == "eval"
    assert held[1]["layout"]["global_offset"] == [2, 0]
    _, out, _ = told(capsys, "show", path)
    shown = dict(line.split(": ", 1) for line in out.splitlines())
    assert shown["layout"].strip() == "dp 1/2 Shard(0) of [4, 3] (from dtensor)"
    assert shown["offset"].strip() == "(2,0)"
    assert shown["mesh"].strip() == "world (2) of ranks 0-1"
    assert json.loads(told(capsys, "show", path, "--json")[1])["layout"]["source"] == "dtensor"


def test_ls_never_calls_an_iteration_with_drops_complete(tree, capsys):
    """It says how many are missing and why, and so does `stats`, which cannot know those."""
    for rank in (0, 1):
        tree.tensor(rank, 0, "Default/fc-Dense/MatMul-op0", np.ones(2, np.float32))
        tree.complete(rank, 0, dropped={"disk_full": 2})
    tree.tensor(0, 1, "Default/fc-Dense/MatMul-op0", np.ones(2, np.float32))
    tree.complete(0, 1)
    _, out, _ = told(capsys, "ls", tree.root)
    sentence = f"ranks 0-1: {describe_drops({'disk_full': 2})[0]}"
    states = [line.split()[-1] for line in out.splitlines()[1:4]]
    assert states == ["dropped", "complete", "dropped"]
    assert out.splitlines()[1].endswith("  2 dropped")
    assert sentence in out.splitlines()
    _, out, _ = told(capsys, "stats", tree.root, "--nonfinite")
    assert "all of them are finite, but 4 tensors of the plan are not in the tree:" in out
    assert sentence in out.splitlines()


def test_ls_names_arguments_buffers_and_models(tree, capsys):
    """A keyword, a result's field, a buffer among parameters, and which of two models it is."""
    values = np.ones(2, np.float32)
    discriminator, generator = (f"Default/network-{name}/{name}-op0" for name in "DG")
    keyword = "kwargs.num_items_in_batch"
    tree.tensor(0, 0, generator, values, side=TensorSide.INPUT, slot=1, argument=keyword)
    tree.tensor(0, 0, generator, values, argument="out.loss")
    tree.tensor(0, 0, "bn.running_mean", values, op_type="Parameter", argument="buffer")
    tree.tensor(0, 0, discriminator, values, argument="out", graph=1)
    tree.complete(0, 0, world_size=1)
    _, out, _ = told(capsys, "ls", tree.root, "--rank", "0")
    lines = [line.split() for line in out.splitlines()]
    assert out.splitlines()[0] == "rank 0, iteration 0, net Net, graph 0, model G"
    assert "rank 0, iteration 0, net Net, graph 1, model D" in out.splitlines()
    assert lines[2] == [*["G-op0", "input", "1", "float32", "(2)", "8", "B"], "num_items_in_batch"]
    assert lines[3] == [*["G-op0", "output", "0", "float32", "(2)", "8", "B"], "loss"]
    assert lines[4] == ["Buffer", "bn.running_mean", "output", "0", "float32", "(2)", "8", "B"]
    assert ["D-op0", "output", "0", "float32", "(2)", "8", "B"] in lines
    _, out, _ = told(capsys, "stats", tree.root)
    assert "output 0 loss" in out
    assert "Buffer bn.running_mean" in out


def test_elements_of_a_list_argument_are_told_apart(tmp_path, capsys):
    """An API dump names the place in the call in place of a slot, which they share."""
    folder = tmp_path / "rank0" / "torch_api_dump"
    folder.mkdir(parents=True)
    for place in ("input.0.0", "input.0.1", "output"):
        np.save(folder / f"Torch_cat_0_forward_{place}.npy", np.ones(2, np.float32))
    code, out, _ = told(capsys, "ls", tmp_path, "--op", "Torch_cat_0_forward")
    assert code == 0
    rows = [line.split() for line in out.splitlines() if "float32" in line]
    assert [row[1:3] for row in rows] == [["input", "0.0"], ["input", "0.1"], ["output", "0"]]


@pytest.mark.parametrize("command", ["ls", "stats"])
def test_several_jobs_of_a_tree_are_told(command, tmp_path, capsys):
    for job in ("one", "two"):
        tree = TreeBuilder(tmp_path, job=job)
        tree.tensor(0, 0, f"Default/{job}/Linear-op0", np.ones(2, np.float32))
        tree.complete(0, 0, world_size=1, session=job)
    run_command_line([command, str(tmp_path)])
    assert "the tree has 2 jobs: --job selects one\n" in capsys.readouterr().out
    run_command_line([command, str(tmp_path), "--job", "one"])
    assert " jobs:" not in capsys.readouterr().out
