"""Two runs of one job: what `rankdump run --twice` does with them, and what it reports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
import pytest
from support.tree_builder import TreeBuilder

from rankdump._analysis.compare.exact_comparison import BITS_FINDING, compare_exactly
from rankdump._cli.command_group import run_command_line
from rankdump._cli.twice_run import (
    check_new_trees,
    format_twice,
    make_body,
    make_exact_config,
    run_twice,
)
from rankdump._config.config_file import load_config_plan
from rankdump._core.record import TensorSide
from rankdump._core.run_card import RunCard, format_card
from rankdump._core.selection import parse_iterations

FIRST = "Default/network-Net/fc-Linear/Linear-op0"
NOISE = "Default/network-Net/noise-Noise/Noise-op0"
CARD = RunCard(
    command=("train.py",), digests={"random.cpu": "aa", "batch.0": "bb"}, settings={"seed": "1"}
)
ONE = np.arange(4, dtype=np.float32)
SWAPPED = ONE[[1, 0, 2, 3]]
"""The same statistics with other bits."""


def make_tree(
    root: Path,
    *,
    noisy_ranks: tuple[int, ...] = (),
    ranks: int = 2,
    rows: bool = True,
    changed: np.ndarray = SWAPPED,
    card: RunCard = CARD,
) -> Path:
    """A tree of two iterations, of which the second one differs on noisy ranks."""
    tree = TreeBuilder(root)
    tree.fingerprints = rows
    write = tree.row if rows else tree.tensor
    for rank in range(ranks):
        for iteration in (0, 1):
            made = changed if rank in noisy_ranks and iteration else ONE
            write(rank, iteration, FIRST, ONE)
            write(rank, iteration, NOISE, ONE, side=TensorSide.INPUT)
            write(rank, iteration, NOISE, made)
            tree.complete(rank, iteration, card=json.loads(format_card(card)))
    return root


@pytest.mark.parametrize("rows", [True, False])
def test_first_operator_that_differs_is_named_for_each_rank(tmp_path: Path, rows: bool) -> None:
    """Also where all statistics are the same: fingerprints tell the bits."""
    trees = [
        make_tree(tmp_path / "first", rows=rows),
        make_tree(tmp_path / "second", noisy_ranks=(1,), rows=rows),
    ]
    found = compare_exactly(*trees)
    assert (found.is_deterministic, found.compared, found.differing) == (False, 12, 1)
    assert found.by_statistics == 0
    lines = format_twice(found)
    assert lines[0] == "not deterministic: 1 of 12 tensors of rank 0-1 in iteration 0-1 differ"
    assert lines[1] == "the difference starts at noise/Noise-op0"
    assert lines[2].strip() == "rank 1, iteration 1, forward"
    assert "its inputs agree, and output.0 differs" in lines[3]
    assert "rank 0 has the same bits in both runs" in lines
    body = make_body(found, [0, 0])
    same, noisy = body["ranks"]  # type: ignore[misc]
    assert same == {"rank": 0, "differs": False}
    assert (noisy["operator"], noisy["iteration"], noisy["certain"]) == (NOISE, 1, True)
    json.dumps(body)


def test_equal_runs_are_deterministic(tmp_path: Path) -> None:
    trees = [make_tree(tmp_path / name) for name in ("first", "second")]
    found = compare_exactly(*trees)
    assert found.is_deterministic
    assert format_twice(found)[0] == (
        "deterministic: 12 tensors of rank 0-1 in iteration 0-1 have the same bits in both runs"
    )


def test_zeros_of_other_signs_differ_in_their_bits(tmp_path: Path) -> None:
    zeros, negative = np.zeros(4, np.float32), -np.zeros(4, np.float32)
    trees = [
        make_tree(tmp_path / name, noisy_ranks=(0,), ranks=1, rows=False, changed=values)
        for name, values in (("first", zeros), ("second", negative))
    ]
    found = compare_exactly(*trees)
    (row,) = (row for row in found.report.rows if not row.outcome.verdict.agrees)
    assert BITS_FINDING in row.outcome.findings


def test_another_seed_leads_the_report(tmp_path: Path) -> None:
    """Then nothing after it tells whether the job is deterministic."""
    other = replace(CARD, digests={**CARD.digests, "random.cpu": "cc"}, settings={"seed": "2"})
    trees = [
        make_tree(tmp_path / "first"),
        make_tree(tmp_path / "second", noisy_ranks=(0, 1), card=other),
    ]
    found = compare_exactly(*trees)
    lines = format_twice(found)
    assert lines[0] == "the runs do not have the same seed:"
    assert "random.cpu (rank 0-1)" in lines[1]
    assert "seed 1 against 2" in lines[2]
    assert not any(line.startswith("not deterministic") for line in lines)
    assert [each.subject for each in found.start_findings] == ["random", "settings"]
    same = compare_exactly(trees[0], make_tree(tmp_path / "third", card=other))
    assert same.is_deterministic  # whatever the seed is, it changes nothing that was dumped
    lines = format_twice(same)
    assert lines[0].startswith("deterministic: ")
    assert lines[1] == "the runs do not have the same seed:"
    batch = replace(CARD, digests={**CARD.digests, "batch.0": "cc"})
    tree = make_tree(tmp_path / "fourth", noisy_ranks=(0,), card=batch)
    lines = format_twice(compare_exactly(trees[0], tree))
    assert lines[0] == "the runs did not start alike:"


def test_trees_without_digests_are_compared_by_statistics(tmp_path: Path) -> None:
    trees: list[Path] = []
    for name in ("first", "second"):
        tree = TreeBuilder(tmp_path / name)
        tree.row(0, 0, FIRST, ONE)
        tree.complete(0, 0)
        trees.append(tree.root)
    found = compare_exactly(*trees)
    assert (found.is_deterministic, found.by_statistics) == (True, 1)
    assert "1 tensor compared by statistics alone" in format_twice(found)[1]


def test_a_rank_of_one_run_alone_is_not_deterministic(tmp_path: Path) -> None:
    trees = [make_tree(tmp_path / "first"), make_tree(tmp_path / "second", ranks=1)]
    found = compare_exactly(*trees)
    assert not found.is_deterministic
    assert any("rank 1" in line for line in format_twice(found))


@pytest.mark.parametrize(
    ("codes", "noisy", "expected"),
    [((0, 0), (), 0), ((0, 0), (1,), 1), ((7,), (), 7), ((0, 9), (1,), 9)],
)
def test_exit_code_is_that_of_a_failed_run_or_of_the_comparison(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    codes: tuple[int, ...],
    noisy: tuple[int, ...],
    expected: int,
) -> None:
    left, seen = [*codes], list[Mapping[str, str]]()

    def run_once(environ: Mapping[str, str]) -> int:
        seen.append(environ)
        make_tree(Path(environ["RANKDUMP_OUTPUT"]), noisy_ranks=noisy if len(seen) > 1 else ())
        return left.pop(0)

    assert run_twice(run_once, {"A": "1"}, tmp_path, as_json=False) == expected
    assert [each["RANKDUMP_OUTPUT"] for each in seen] == [
        str(tmp_path / name) for name in ("first", "second")[: len(codes)]
    ]
    assert {each["PYTHONHASHSEED"] for each in seen} == {"0"}
    err = capsys.readouterr().err
    if len(codes) == 1:
        assert "the first run ended with code 7: there is no second one to compare" in err
    assert ("the second run ended with code 9, not 0" in err) == (codes == (0, 9))


def test_json_is_one_object_and_a_hash_seed_of_the_user_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_once(environ: Mapping[str, str]) -> int:
        assert environ["PYTHONHASHSEED"] == "5"
        make_tree(Path(environ["RANKDUMP_OUTPUT"]))
        return 0

    assert run_twice(run_once, {"PYTHONHASHSEED": "5"}, tmp_path, as_json=True) == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["version"], body["deterministic"], body["codes"]) == (1, True, [0, 0])


def test_a_run_without_a_dump_ends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_twice(lambda environ: 0, {}, tmp_path, as_json=False) == 1
    assert "the first run dumped nothing" in capsys.readouterr().err


def test_existing_trees_are_not_mixed_with_new_ones(tmp_path: Path) -> None:
    check_new_trees(tmp_path)
    (tmp_path / "second").mkdir()
    with pytest.raises(click.UsageError, match=r"second exists"):
        check_new_trees(tmp_path)


def test_own_configuration_saves_digests_and_no_elements(tmp_path: Path) -> None:
    file = tmp_path / "twice.json"
    file.write_text(make_exact_config(tmp_path, parse_iterations("0|2-3")))
    plan, _ = load_config_plan(file, {})
    assert plan.warnings == ()
    assert (plan.content.saved, plan.content.fingerprints) == ("statistic", True)
    assert plan.selection.iterations.text == "0|2-3"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--twice"], "--twice without a configuration needs --output"),
        (["--twice", "--blackbox", "--output", "x"], "--twice has no --blackbox"),
        (["--json"], "need --twice"),
        (["--iteration", "0"], "need --twice"),
        (["--twice", "--config", "x.json", "--iteration", "0"], "without a configuration"),
    ],
)
def test_options_that_do_not_fit_are_one_line(
    options: list[str],
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANKDUMP_CONFIG", "MINDSPORE_DUMP_CONFIG", "RANKDUMP_OUTPUT"):
        monkeypatch.delenv(name, raising=False)
    code = run_command_line(["run", *options, "--", "true"])
    captured = capsys.readouterr()
    assert (code, captured.out, captured.err.count("\n")) == (2, "", 1)
    assert text in captured.err


def test_options_behind_the_command_are_those_of_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[str, ...]] = []

    def run_collected(command: tuple[str, ...], *args: object, **keywords: object) -> int:
        seen.append(command)
        return 0

    monkeypatch.setattr("rankdump._cli.run._run_collected", run_collected)
    for words in (["train.py", "--json", "--twice"], ["--", "train.py", "--output", "x"]):
        assert run_command_line(["run", *words]) == 0
    assert seen == [("train.py", "--json", "--twice"), ("train.py", "--output", "x")]


@pytest.mark.parametrize(("second", "said"), [(3, "3 were"), (4, "3 and 4 were")])
def test_dropped_tensors_are_not_called_deterministic(
    tmp_path: Path, second: int, said: str
) -> None:
    trees = [tmp_path / "first", tmp_path / "second"]
    for root, dropped in zip(trees, (3, second), strict=True):
        tree = TreeBuilder(root)
        tree.tensor(0, 0, FIRST, ONE)
        tree.complete(0, 0, world_size=1, expected=1 + dropped, dropped={"buffer_full": dropped})
    found = compare_exactly(*trees)
    assert found.is_deterministic
    assert format_twice(found)[0] == (
        "deterministic: 1 tensor of rank 0 in iteration 0 have the same bits in both runs; "
        f"{said} dropped and not compared"
    )
    assert make_body(found, [0, 0])["dropped"] == [3, second]
