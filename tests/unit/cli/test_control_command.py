"""`rankdump control`: what is wrong with a command is one line, and what became of an order is told
rank by rank.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.command_line import run_in_process

from rankdump._analysis.reader.job_sentences import format_result
from rankdump._cli import daemon_client
from rankdump._cli.live_tree import LiveJob
from rankdump._core.job_control import ControlAction, ControlledRank, ControlResult

NOWHERE = "unix:/nowhere/c.sock"


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (
            ["job", "explode"],
            2,
            "'ACTION': 'explode' is not one of 'start', 'stop', 'iterations', ",
        ),
        (["", "stop"], 2, "JOB is empty"),
        (["job", "stop", "--tree", "/"], 2, "--tree and --coordinator cannot be combined"),
        (["job", "stop", "now"], 2, "control: stop: 'now' is not allowed; allowed: no value"),
        (["job", "iterations", "9-5"], 2, "control: iterations: '9-5' is not allowed; allowed: "),
        (["job", "iterations", "5", "7"], 2, "'5 7' is not allowed; allowed: one value: "),
        (["job", "operators"], 2, "control: operators: '' is not allowed; allowed: "),
        (["job", "operators", "name-regex(()"], 2, "allowed: a valid regular expression"),
        (["job", "saved-data", "both"], 2, "'both' is not allowed; allowed: tensor, statistic, "),
        (["job", "freeze", "a", "b"], 2, "'a b' is not allowed; allowed: one text that says why"),
        (["job", "stop"], 3, f"no coordinator answers at {NOWHERE}: No such file or directory"),
    ],
)
def test_wrong_command_is_one_line(words: list[str], code: int, line: str):
    done = run_in_process("control", *words, "--coordinator", NOWHERE)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1)
    assert line in done.stderr


def test_job_that_runs_in_no_tree_is_one_line(tmp_path):
    done = run_in_process("control", "job", "stop", "--tree", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"rankdump: no job 'job' runs that dumps into {tmp_path}\n"
    done = run_in_process("freeze", "--tree", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"rankdump: no job runs that dumps into {tmp_path}\n"


def test_freeze_asks_an_agent_of_the_job_in_a_tree(tmp_path, monkeypatch):
    """As `control` asks its coordinator; the job need not be named."""
    asked: list[tuple[str, ...]] = []

    def freeze_job(*words: str) -> daemon_client.FrozenTrees:
        asked.append(words)
        return daemon_client.FrozenTrees(("/dump/blackbox/3",), ())

    running = LiveJob("train", "", ("unix:/run/a.sock", "unix:/run/b.sock"))
    jobs = iter([running, replace(running, agents=())])
    monkeypatch.setattr("rankdump._cli.control.find_live_job", lambda tree, job: next(jobs))
    monkeypatch.setattr(daemon_client, "freeze_job", freeze_job)
    done = run_in_process("freeze", "--tree", tmp_path, "--reason", "odd")
    assert (done.returncode, done.stdout) == (0, "frozen tree: /dump/blackbox/3\n")
    assert asked == [("unix:/run/a.sock", "train", "odd")]
    done = run_in_process("freeze", "--tree", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "no agent that can be reached from here" in done.stderr
    done = run_in_process("freeze", "--tree", tmp_path, "--agent", NOWHERE)
    assert (done.returncode, done.stderr) == (
        2, "rankdump: --tree and --agent cannot be combined\n"
    )  # fmt: skip


def test_ranks_with_the_same_result_share_a_line():
    note = "'a' matches none of the 12 operators that it has seen so far"
    ranks = (
        *(ControlledRank(rank, 9, note=note) for rank in range(3)),
        ControlledRank(3, 11, "it was past iteration 9 already", note=note),
        *(ControlledRank(rank, None, "it has ended its session") for rank in (4, 5)),
        ControlledRank(6, None, "no answer", unconfirmed=True),
    )
    result = ControlResult(9, ranks)
    assert format_result("job", ControlAction.OPERATORS, ("a",), result) == [
        "job job: operators a from iteration 9 on, ranks 0-3",
        "rank 3: from iteration 11 on: it was past iteration 9 already",
        "ranks 4-5: not changed: it has ended its session",
        "rank 6: not confirmed: no answer",
        f"ranks 0-3: {note}",
    ]
