"""First report about a fault: the earliest bad value, the steps before, and who is missing."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rankdump._analysis.black_box.fault_report import AbsentRanks, make_fault_report
from rankdump._analysis.black_box.freeze_files import (
    find_frozen_tree,
    list_freezes,
    read_freeze_records,
)
from rankdump._cli.command_group import run_command_line
from rankdump._core.black_box import FaultKind, GroupCalls
from rankdump._core.freeze_record import (
    FreezeRecord,
    FrozenCause,
    FrozenRank,
    FrozenStep,
    MissingRank,
    NonfiniteTensor,
    format_freeze_record,
    make_record_name,
)
from rankdump._core.status import SessionState
from rankdump.errors import CorruptedError

CAUSE = FrozenCause(
    FaultKind.NON_FINITE,
    5,
    "NaN in an output",
    1000,
    2,
    "Linear",
    "Default/b-Linear/Linear-op0",
    "output",
    source="train.py:7",
)


def bad(at_us: int, name: str = "Default/b-Linear/Linear-op0") -> NonfiniteTensor:
    return NonfiniteTensor("Linear", name, "output", 0, "", 4, 0, at_us, 17)


def step(iteration: int, **fields) -> FrozenStep:
    numbers = {"loss": f"{iteration / 2}"}
    usual: dict[str, Any] = {
        "tensors": 20,
        "gradient_norm": "2.0",
        "largest": "3.5",
        "numbers": numbers,
    }
    return FrozenStep(iteration, 10 * iteration, 10 * iteration + 5, **(usual | fields))


def rank_of(number: int, *steps: FrozenStep, **fields) -> FrozenRank:
    return FrozenRank(
        number, f"s{number}", 1, SessionState.OPEN, held_steps=len(steps), steps=steps, **fields
    )


def record_of(*ranks: FrozenRank, **fields) -> FreezeRecord:
    usual: dict[str, Any] = {
        "world_size": 4,
        "frozen_us": 50,
        "causes": (CAUSE,),
        "ranks": ranks,
        "host": "node1",
    }
    return FreezeRecord("job", 0, 5, **(usual | fields))


def write_tree(folder: Path, *records: FreezeRecord) -> Path:
    state = folder / ".rankdump"
    state.mkdir(parents=True)
    for record in records:
        path = state / make_record_name(record.host, "a")
        path.write_bytes(format_freeze_record(record))
        os.utime(path, ns=(record.frozen_us, record.frozen_us))
    return folder


def test_first_bad_value_is_the_earliest_of_all_ranks():
    report = make_fault_report(
        "/t",
        [
            record_of(
                rank_of(0, step(5, first_nonfinite=bad(90), nonfinite=3), step(6)),
                rank_of(2, step(5, first_nonfinite=bad(80), nonfinite=1)),
            ),
            record_of(rank_of(1, step(6, first_nonfinite=bad(7), nonfinite=9)), host="node2"),
        ],
    )
    found = report.first_bad_value
    assert found
    assert (found.rank, found.iteration, found.tensor.at_us, found.source) == (
        2,
        5,
        80,
        "train.py:7",
    )
    assert [(each.iteration, each.ranks, each.nonfinite) for each in report.steps] == [
        (5, 2, 4),
        (6, 2, 9),
    ]
    unknown = "no session on node1, node2: on a host that was not frozen, or never started"
    assert report.absent == (AbsentRanks(3, 3, unknown),)


def test_gradient_comes_behind_an_output_of_its_iteration_whatever_the_clocks_say():
    """Another rank's gradient, which a collective made NaN, may have the earlier time."""
    gradient = bad(70, "Gradients/b.weight")
    ranks = (
        rank_of(0, step(5, first_nonfinite=gradient)),
        rank_of(1, step(5, first_nonfinite=bad(80))),
    )
    found = make_fault_report("/t", [record_of(*ranks)]).first_bad_value
    assert found
    assert found.rank == 1
    alone = make_fault_report("/t", [record_of(ranks[0])]).first_bad_value
    assert alone
    assert alone.rank == 0


def test_norm_of_a_step_is_the_worst_of_all_ranks():
    report = make_fault_report(
        "/t",
        [
            record_of(
                rank_of(0, step(5, gradient_norm="inf")),
                rank_of(1, step(5)),
                rank_of(2, step(5, gradient_norm="nan", largest="")),
            )
        ],
    )
    [found] = report.steps
    assert (found.gradient_norm, found.largest, found.loss) == ("nan", "3.5", "2.5")


def test_missing_ranks_have_the_reason_that_an_agent_knows():
    record = record_of(
        rank_of(1, step(5)), world_size=1 << 20, missing=(MissingRank(3, "it had ended"),)
    )
    other = "no session on node1: on a host that was not frozen, or never started"
    assert make_fault_report("/t", [record]).absent == (
        AbsentRanks(3, 3, "it had ended"),
        AbsentRanks(0, 0, other),
        AbsentRanks(2, 2, other),
        AbsentRanks(4, (1 << 20) - 1, other),
    )


def test_records_of_several_agents_are_one_report():
    """Their common cause is named once, and consecutive ranks with one reason are one line."""
    later = dataclasses.replace(CAUSE, rank=3, at_us=CAUSE.at_us + 5)
    # A message has made something else of a text.
    again = dataclasses.replace(CAUSE, text="NaN?")
    reason = "its agent last reported 9 s ago (host node3)"
    missing = tuple(MissingRank(rank, reason) for rank in (4, 5))
    report = make_fault_report(
        "/t",
        [
            record_of(
                rank_of(0, step(5)), world_size=8, missing=missing, agents=4, frozen_agents=3
            ),
            record_of(
                rank_of(4, step(5)), host="node2", frozen_us=60, causes=(again, later), world_size=8
            ),
        ],
    )
    assert (report.cause.identity, report.later_causes) == (CAUSE.identity, (later,))
    elsewhere = (
        "no session on node1, node2: another agent has frozen the job, on another disk or not "
        "written yet, or never started"
    )
    assert report.absent == (
        # Of the other one of this agent there is a record by now.
        AbsentRanks(5, 5, reason),
        AbsentRanks(1, 3, elsewhere),
        AbsentRanks(6, 7, elsewhere),
    )


def test_latest_tree_beside_a_dump_is_found(tmp_path):
    for number, iteration in ((1, 9), (2, 5)):
        write_tree(
            tmp_path / f"blackbox/{iteration}",
            dataclasses.replace(record_of(rank_of(0, step(5))), frozen_us=number),
        )
    (tmp_path / "blackbox/77/.rankdump").mkdir(parents=True)
    newest = tmp_path / "blackbox/5"
    assert find_frozen_tree(tmp_path) == newest
    assert find_frozen_tree(newest) == newest
    freezes, problems = list_freezes(tmp_path)
    assert [each.root for each in freezes] == [str(tmp_path / "blackbox/9"), str(newest)]
    assert problems == []
    assert list_freezes(tmp_path, "other") == ((), [])


def test_command_reports_the_fault(tmp_path, capsys):
    calls = GroupCalls("world", (1, 2), 8, "all_reduce", 61)
    hung = step(6, unfinished=True, numbers={}, stacks=("File a.py, line 3\n  all_reduce\x1b[1m",))
    hung = dataclasses.replace(hung, ended_us=30_000_061, calls=(calls,))
    earlier = (dataclasses.replace(calls, ranks=(), count=7),)
    lost = dataclasses.replace(rank_of(3, step(5)), state=SessionState.LOST, ended_by="SIGKILL")
    later = FrozenCause(FaultKind.LOST_RANK, 5, "rank 3 ended", 2000, 3)
    record = record_of(
        rank_of(1, step(4), hung),
        rank_of(
            2,
            step(4, notes=("watch[0] (zero): all are zero",)),
            step(5, first_nonfinite=bad(80), nonfinite=1, full_tensors=3, calls=earlier),
            dropped_steps=2,
            dropped_tensors=1,
        ),
        lost,
        causes=(CAUSE, later),
    )
    tree = write_tree(tmp_path / "t", record)
    assert run_command_line(["faults", str(tree), "--stacks"]) == 0
    printed = capsys.readouterr().out
    for line in (
        "cause: non_finite, rank 2, iteration 5: NaN in an output; output 0 of b/Linear-op0; "
        "train.py:7",
        "first value that is not finite: rank 2, iteration 5: output 0 of b/Linear-op0 (4 NaN)",
        "  clean before it on that rank in that iteration: 17 tensors",
        "later: lost_rank, rank 3, iteration 5: rank 3 ended",
        "rank 1 called all_reduce number 7 of group 'world' 30 s before the freeze and none after "
        "it; rank 2 has not called it: it called the 7 collectives before it",
        "rank 2, iteration 4: watch[0] (zero): all are zero",
        "rank 1 had not ended iteration 6 (1 stack: --stacks)",
        "rank 3 is lost (SIGKILL); its last step is iteration 5",
        "rank 0 is missing: no session on node1: on a host that was not frozen, or never started",
        "2 older steps and 1 older full tensor had been dropped because the agent's memory was "
        "short",
        f"  3 tensors of that iteration in full: rankdump ls {tree} --rank 2 --iteration 5",
        "    all_reduce_[1m",
    ):
        assert line in printed.splitlines(), line
    assert "\x1b" not in printed
    table = [line.split() for line in printed.splitlines() if line.strip().startswith("6 ")]
    assert table == [["6", "1", "1", "-", "2", "3.5", "0", "0"]]
    assert run_command_line(["faults", str(tree), "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["cause"]["kind"], body["first_bad_value"]["rank"]) == ("non_finite", 2)


def test_notes_of_watch_rules_are_bounded():
    noted = rank_of(0, *(step(at, notes=(f"note {at}",)) for at in range(40)))
    notes = make_fault_report("t", [record_of(noted)]).notes
    assert [note.text for note in notes] == [f"note {at}" for at in range(8, 40)]


@pytest.mark.parametrize("data", [b"{", b'{"version": 1}', b"\0" * 9])
def test_damaged_record_is_one_line(tmp_path, capsys, data):
    tree = write_tree(tmp_path / "dump/blackbox/5", record_of(rank_of(0, step(5))))
    [path] = (tree / ".rankdump").iterdir()
    path.write_bytes(data)
    assert run_command_line(["faults", str(tree)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"rankdump: {path}: not a record of a freeze")
    assert error.count("\n") == 1
    assert list_freezes(tmp_path / "dump")[1][0].startswith(str(path))


def test_link_in_the_place_of_a_record_is_not_followed(tmp_path):
    tree = write_tree(tmp_path / "t", record_of(rank_of(0, step(5))))
    [path] = (tree / ".rankdump").iterdir()
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptedError, match="cannot be read"):
        read_freeze_records(tree)


def test_dump_without_a_frozen_tree_is_one_line(tmp_path, capsys):
    assert run_command_line(["faults", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"rankdump: {tmp_path}: no frozen tree, nor a folder blackbox with one\n"
    )
