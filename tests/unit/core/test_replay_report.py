"""Comparison of two runs of a step by their digests, and its sentences."""

from __future__ import annotations

from rankdump._core.determinism import (
    MAX_DIFFERENCES,
    ReplayDifference,
    ReplayReport,
    ReplayTally,
    RunDigests,
    TensorDigest,
    compare_runs,
)
from rankdump._core.record import TensorSide

FORWARD = "Default/network-Net/fc-Linear/Linear-op0"


def seen(*digests: tuple[str, str, str], kind: str = "float32 (2)") -> RunDigests:
    """A run of (operator, side, digest)."""
    made = [
        TensorDigest("Linear", name, TensorSide(side), 0, "", kind, digest)
        for name, side, digest in digests
    ]
    return RunDigests(made, {FORWARD: "train.py:7"})


def test_first_difference_is_that_of_the_first_run() -> None:
    """Inner operators end before outer ones, so the innermost one leads."""
    outer = "Default/network-Net/Net-op0"
    order = [(outer, "input"), (FORWARD, "input"), (FORWARD, "output"), (outer, "output")]
    first = seen(*((name, side, "a") for name, side in order))
    second = seen(*((name, side, "a" if side == "input" else "b") for name, side in order))
    count, (inner, around) = compare_runs(first, second)
    assert count == 2
    assert inner == ReplayDifference(
        FORWARD, "Linear", "output.0", "its inputs agree, and output.0 differs", "train.py:7"
    )
    assert around.op_name == outer
    assert compare_runs(first, first) == (0, ())


def test_backward_has_the_line_of_its_forward() -> None:
    name = f"Gradients/{FORWARD}"
    _, (found,) = compare_runs(seen((name, "output", "a")), seen((name, "output", "b")))
    assert (found.source, found.reason) == ("train.py:7", "output.0 differs")


def test_calls_of_one_run_alone_and_other_types_differ() -> None:
    once, twice = seen((FORWARD, "output", "a")), seen(*[(FORWARD, "output", "a")] * 2)
    assert compare_runs(twice, once)[1][0].reason == "only the first run has its output.0"
    assert compare_runs(once, twice)[1][0].reason == "only the second run has its output.0"
    # A run that an error ended has not come to everything.
    assert compare_runs(twice, once, complete=False) == (0, ())
    other = seen((FORWARD, "output", "a"), kind="float16 (2)")
    assert compare_runs(once, other)[1][0].reason == (
        "output.0 differs (float32 (2) in the first run, float16 (2) in the second)"
    )


def test_differences_beyond_the_limit_are_counted() -> None:
    names = [f"op{number}" for number in range(MAX_DIFFERENCES + 3)]
    first, second = (seen(*((name, "output", each) for name in names)) for each in "ab")
    count, kept = compare_runs(first, second)
    assert (count, len(kept)) == (MAX_DIFFERENCES + 3, MAX_DIFFERENCES)


def test_reports_are_one_sentence() -> None:
    found = ReplayDifference(FORWARD, "Linear", "output.0", "output.0 differs", "train.py:7")
    start = "replay of iteration 3 on rank 1: "
    assert str(ReplayReport(3, 1, 9, 1, (found,), calls=2)) == (
        f"{start}1 of 9 digests differ; first {FORWARD}: output.0 differs, at train.py:7"
    )
    assert str(ReplayReport(3, 1, 9, calls=2)) == f"{start}all 9 digests are the same"
    assert str(ReplayReport(3, 1, 9, unread=1)) == (
        f"{start}all 9 digests are the same; no call of an attached model was observed; "
        "1 tensor could not be read"
    )
    assert str(ReplayReport(3, 1, 9, calls=2, raised="E: x")) == (
        f"{start}all 9 digests are the same; the second run raised E: x"
    )
    skipped = ReplayReport(3, 1, skipped="no memory")
    assert str(skipped) == f"{start}skipped, the step ran once: no memory"
    deterministic = [ReplayReport(3, 1, 9), ReplayReport(3, 1, 9, raised="E"), skipped]
    assert [each.is_deterministic for each in deterministic] == [True, False, None]


def test_notes_of_a_session_are_few() -> None:
    tally = ReplayTally()
    assert tally.list_notes() == []
    for iteration in range(20):
        tally.add(ReplayReport(iteration, 0, 9, iteration % 2, calls=2))
    notes = tally.list_notes()
    assert notes[0] == "replay of iteration 1: 1 of 9 digests differ"
    assert notes[-2:] == [
        "2 more replays differ or were skipped",
        "10 steps were replayed with the same digests",
    ]
