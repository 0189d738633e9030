"""Selection options, which have the same effect in every command that reads tensors."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.tree_builder import TreeBuilder

from rankdump._cli.command_group import run_command_line
from rankdump._core.events import EventKind
from rankdump._core.execution_order import (
    GLOBAL_ORDER_FOLDER,
    ORDER_HEADER,
    format_order_line,
    make_order_file_name,
)
from rankdump._core.status import OrderEntry

NAMES = [f"Default/network-Net/fc{number}-Linear/Linear-op0" for number in range(2)]
GRAPH = "".join(
    f"""  %{at}(a) = Linear(%x)
      # Fullname with scope: ({name})
      # In file /job/net.py:7/    return fc(x)/
"""
    for at, name in enumerate(NAMES)
)
READERS = ("ls", "stats", "find-source", "diff", "order")


def told(capsys, *arguments):
    """Return exit code, standard output and standard error of one command line."""
    code = run_command_line([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def root(tmp_path):
    """Two jobs dumped the same iteration of the same rank; the second one in graph 1 as well."""
    root = tmp_path / "tree"
    for at, job in enumerate(("first", "second")):
        tree = TreeBuilder(root, job=job, clock_us=1_700_000_000_000_000 + at * 1_000_000)
        for name in NAMES:
            tree.tensor(0, 0, name, np.full(2, at, np.float32), tabled=True)
        if at:
            tree.tensor(0, 0, "Default/late-Linear/Linear-op1", np.ones(3, np.float32), graph=1)
        tree.complete(0, 0, world_size=1, session=f"session{at}")
    for graph in (0, 1):
        TreeBuilder(root).graph(0, GRAPH, graph=graph)
    folder = root / GLOBAL_ORDER_FOLDER
    folder.mkdir()
    for graph in (0, 1):
        entries = [OrderEntry(n, graph, 0, (0,), NAMES[n], EventKind.OPERATOR) for n in (0, 1)]
        (folder / make_order_file_name(graph)).write_text(
            ORDER_HEADER + "".join(map(format_order_line, entries))
        )
    (folder / "execution_order.job").write_text("second")
    return root


def names_of(command, root, capsys, *options):
    """Return the names of operators in the answer of a command."""
    paths = {"diff": [root, root], "find-source": [root, "net.py:7"]}.get(command, [root])
    _, out, err = told(capsys, command, *paths, *options, "--json")
    assert err == ""
    body = json.loads(out)
    found = {"diff": "rows", "find-source": "operators", "order": "entries"}.get(command, "tensors")
    key = {"diff": "name_a", "order": "name"}.get(command, "op_name")
    return [each[key] for each in body[found]]


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--op", "*fc1*"], {NAMES[1]}),
        (["--op-regex", "fc[1-9]-"], {NAMES[1]}),
        (["--op", "Linear", "--op-regex", "fc0", "--graph", "0"], {NAMES[0]}),
        (["--rank", "0", "--iteration", "0", "--op", "*fc*", "--op-regex", "1-L"], {NAMES[1]}),
        (["--job", "second", "--op", "*fc*", "--graph", "0"], set(NAMES)),
    ],
)
def test_selection_is_the_same_in_every_command(command, options, wanted, root, capsys):
    """The same words leave the same operators wherever operators are shown."""
    assert set(names_of(command, root, capsys, *options)) == wanted


def test_job_option_selects_one_of_two_jobs(root, capsys):
    """Files, rows and balances are those of the job; nothing of the other one is counted."""
    assert len(names_of("ls", root, capsys)) == 5
    for job, count, value in (("first", 2, 0.0), ("second", 3, 1.0)):
        assert len(names_of("ls", root, capsys, "--job", job)) == count
        body = json.loads(told(capsys, "stats", root, "--json", "--job", job)[1])
        assert {tensor["max"] for tensor in body["tensors"]} == {value}
        assert body["tensor_count"] == count
        status = json.loads(told(capsys, "status", root, "--job", job, "--json")[1])
        assert [(i["job_id"], i["stored"]) for i in status["iterations"]] == [(job, count)]
    _, out, _ = told(capsys, "diff", root, root, "--job-a", "first", "--job-b", "second")
    assert "2 different" in out
    assert "only in b: 1 call" in out


@pytest.mark.parametrize("command", [*READERS, "status"])
def test_job_option_names_the_known_jobs(command, root, capsys):
    """One line that names the jobs there are, or says that there is nothing of this one."""
    paths = {"diff": [root, root], "find-source": [root, "net.py:7"]}.get(command, [root])
    code, out, err = told(capsys, command, *paths, "--job", "third")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "job 'third'" in err
    if command != "order":
        assert "known: 'first', 'second'" in err


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--op", "["], "'[' is not a glob: a [ has no ] after it"),
        (["--op", "fc[0-9"], "is not a glob"),
        (["--op-regex", "["], "is not a regular expression"),
        (["--iteration", "3-1"], "'3-1' runs backwards"),
        (["--iteration", "0||2"], "is an empty segment"),
        (["--iteration", "0,2"], 'allowed: "all"'),
    ],
)
def test_invalid_selection_is_an_error_in_one_line(command, options, words, root, capsys):
    """A mistyped selection must not look like a tree without a match."""
    paths = {"diff": [root, root], "find-source": [root, "net.py:7"]}.get(command, [root])
    code, out, err = told(capsys, command, *paths, *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


@pytest.mark.parametrize("glob", ["[[]*", "*fc[01]*", "*[!0]-Linear*", "a[]]b"])
def test_op_option_accepts_closed_brackets(glob, root, capsys):
    """What fnmatch reads as a class of characters is one."""
    assert told(capsys, "ls", root, "--op", glob)[0] == 0


@pytest.mark.parametrize("command", ["ls", "stats", "status", "find-source", "order", "diff"])
def test_empty_folder_is_an_error(command, tmp_path, capsys):
    """Nothing was read: that is said in one line, and no script takes it for an answer."""
    paths = {"diff": [tmp_path] * 2, "find-source": [tmp_path, "a"]}.get(command, [tmp_path])
    code, out, err = told(capsys, command, *paths)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert str(tmp_path) in err


def test_operators_without_a_file_differ_from_excluded_ones(root, capsys):
    """Where a side was asked for, the operator may have files of the other one."""
    line = (root, "net.py:7", "--graph", "1")
    assert "2 operators without a file" in told(capsys, "find-source", *line)[1]
    out = told(capsys, "find-source", *line, "--side", "input")[1]
    assert "2 operators without a matching file" in out
