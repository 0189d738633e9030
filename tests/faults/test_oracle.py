"""Oracle with falsified results, each of which it must find, and with a correct one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from faults.oracle import breaches, stored, told_once
from faults.tensor_content import OPERATORS, kept, names
from faults.values import (
    FoundTensor,
    IterationEndRow,
    LedgerContent,
    LedgerRow,
    ListedManifest,
    PlacedOperator,
    ProcessGrowth,
    RankLife,
    RunObservation,
    TensorName,
)

SESSION, ROOT = "session", "/tree"
ITERATIONS = 2
NAMES = [name for i in range(ITERATIONS) for name in filter(kept, names(0, 0, i))]
DUE = len(NAMES) // ITERATIONS


def path_of(name: TensorName) -> str:
    return f"rank_0/{name.iteration}/{name.number}.{name.slot}"


def truth() -> RunObservation:
    """A run of one rank in which all went well."""
    rows = [
        LedgerRow(SESSION, n, replace(name, slot=-1), "stored", "", path_of(name))
        for n, name in enumerate(NAMES, 1)
    ]
    numbers = frozenset(range(1, len(NAMES) + ITERATIONS + 1))
    ended = dict.fromkeys(range(ITERATIONS), DUE)
    return RunObservation(
        lives=(RankLife(0, 0, SESSION, ROOT, ITERATIONS - 1, ended, True, max(numbers)),),
        ledger=LedgerContent(
            tuple(rows),
            tuple(IterationEndRow(SESSION, i, DUE, {}) for i in ended),
            {SESSION: numbers},
        ),
        files=tuple(FoundTensor(ROOT, path_of(name), name, "") for name in NAMES),
        manifests=tuple(
            ListedManifest(
                SESSION, i, DUE, DUE, {}, tuple(path_of(n) for n in NAMES if n.iteration == i)
            )
            for i in ended
        ),
        balances={(SESSION, i): (DUE, DUE, 0) for i in ended},
        placed={
            PlacedOperator(ROOT, TensorName(0, 0, i, number, 0)): 1
            for i in ended
            for number in range(OPERATORS)
        },
        growths=(ProcessGrowth("agent a (7)", 500.0, 60.0, 61.5, 30, 29),),
    )


def with_row(seen: RunObservation, at: int, **changed: object) -> RunObservation:
    rows = list(seen.ledger.rows)
    rows[at] = replace(rows[at], **changed)
    return replace(seen, ledger=replace(seen.ledger, rows=tuple(rows)))


def with_file(seen: RunObservation, file: FoundTensor) -> RunObservation:
    return replace(seen, files=(*seen.files, file))


def lost_file(seen: RunObservation) -> RunObservation:
    return replace(seen, files=seen.files[1:])


def lost_number(seen: RunObservation) -> RunObservation:
    ledger = replace(seen.ledger, sequences={SESSION: seen.ledger.sequences[SESSION] - {3}})
    return replace(seen, ledger=ledger)


def lost_row(seen: RunObservation) -> RunObservation:
    return replace(seen, ledger=replace(seen.ledger, rows=seen.ledger.rows[1:]))


def lost_manifest(seen: RunObservation) -> RunObservation:
    return replace(seen, manifests=seen.manifests[1:])


def lost_end(seen: RunObservation) -> RunObservation:
    return replace(seen, ledger=replace(seen.ledger, ends=seen.ledger.ends[1:]))


def doubled_file(seen: RunObservation) -> RunObservation:
    return with_file(seen, replace(seen.files[0], path="rank_0/0/again"))


def doubled_row(seen: RunObservation) -> RunObservation:
    rows = (*seen.ledger.rows, replace(seen.ledger.rows[0], sequence=99))
    return replace(seen, ledger=replace(seen.ledger, rows=rows))


def altered_file(seen: RunObservation) -> RunObservation:
    other = replace(seen.files[0], fault="other elements than were dumped")
    return replace(seen, files=(other, *seen.files[1:]))


def unknown_file(seen: RunObservation) -> RunObservation:
    return with_file(seen, FoundTensor(ROOT, "rank_0/0/x", None, ""))


def file_of_no_life(seen: RunObservation) -> RunObservation:
    return with_file(seen, FoundTensor(ROOT, "rank_0/0/x", replace(NAMES[0], life=7), ""))


def file_before_its_time(seen: RunObservation) -> RunObservation:
    return with_file(seen, FoundTensor(ROOT, "rank_0/9/x", replace(NAMES[0], iteration=9), ""))


def unknown_row(seen: RunObservation) -> RunObservation:
    return with_row(seen, 0, session_id="nobody's")


def dropped_but_there(seen: RunObservation) -> RunObservation:
    return with_row(seen, 0, fate="dropped", reason="buffer_full", path="")


def dropped_for_no_fault(seen: RunObservation) -> RunObservation:
    return lost_file(with_row(seen, 0, fate="dropped", reason="disk_full", path=""))


def dropped_for_no_reason(seen: RunObservation) -> RunObservation:
    return lost_file(with_row(seen, 0, fate="dropped", reason="whim", path=""))


def another_path(seen: RunObservation) -> RunObservation:
    return with_row(seen, 0, path=path_of(NAMES[-1]))


def early_manifest(seen: RunObservation) -> RunObservation:
    return replace(seen, manifests=(*seen.manifests, replace(seen.manifests[0], iteration=9)))


def manifest_of_a_lost_file(seen: RunObservation) -> RunObservation:
    listed = replace(seen.manifests[0], paths=("rank_0/0/gone",))
    return replace(seen, manifests=(listed, *seen.manifests[1:]))


def manifest_out_of_balance(seen: RunObservation) -> RunObservation:
    return replace(seen, manifests=(replace(seen.manifests[0], kept=DUE - 1), *seen.manifests[1:]))


def other_balance_told(seen: RunObservation) -> RunObservation:
    return replace(seen, balances={**seen.balances, (SESSION, 0): (DUE, DUE - 1, 1)})


def balance_never_told(seen: RunObservation) -> RunObservation:
    return replace(seen, balances={})


def complaint(seen: RunObservation) -> RunObservation:
    return replace(seen, complaints=("agent a ended with -6",))


def operator_not_in_order(seen: RunObservation) -> RunObservation:
    return replace(seen, placed=dict(list(seen.placed.items())[1:]))


def more_missing_than_is_said_to_be_late(seen: RunObservation) -> RunObservation:
    return replace(seen, placed={}, late={(0, 0): OPERATORS - 1, (0, 1): OPERATORS})


def operator_twice_in_order(seen: RunObservation) -> RunObservation:
    return replace(seen, placed={**seen.placed, next(iter(seen.placed)): 2})


def operator_of_nobody(seen: RunObservation) -> RunObservation:
    return replace(seen, placed={**seen.placed, PlacedOperator(ROOT, None): 1})


def operator_of_no_life(seen: RunObservation) -> RunObservation:
    return replace(seen, placed={**seen.placed, PlacedOperator(ROOT, TensorName(0, 7, 0, 1, 0)): 1})


def operator_before_its_time(seen: RunObservation) -> RunObservation:
    return replace(seen, placed={**seen.placed, PlacedOperator(ROOT, TensorName(0, 0, 9, 1, 0)): 1})


def operator_in_the_order_of_another_job(seen: RunObservation) -> RunObservation:
    return replace(
        seen, placed={**seen.placed, PlacedOperator("/other", TensorName(0, 0, 0, 1, 0)): 1}
    )


def memory_that_grows(seen: RunObservation) -> RunObservation:
    return replace(seen, growths=(replace(seen.growths[0], late_mib=120.0),))


def descriptors_that_stay_open(seen: RunObservation) -> RunObservation:
    return replace(seen, growths=(replace(seen.growths[0], late_descriptors=60),))


LIES: list[Callable[[RunObservation], RunObservation]] = [
    lost_file,
    lost_number,
    lost_row,
    lost_manifest,
    lost_end,
    doubled_file,
    doubled_row,
    altered_file,
    unknown_file,
    file_of_no_life,
    file_before_its_time,
    unknown_row,
    dropped_but_there,
    dropped_for_no_fault,
    dropped_for_no_reason,
    another_path,
    early_manifest,
    manifest_of_a_lost_file,
    manifest_out_of_balance,
    other_balance_told,
    balance_never_told,
    complaint,
    operator_not_in_order,
    more_missing_than_is_said_to_be_late,
    operator_twice_in_order,
    operator_of_nobody,
    operator_of_no_life,
    operator_before_its_time,
    operator_in_the_order_of_another_job,
    memory_that_grows,
    descriptors_that_stay_open,
]


def test_oracle_reports_nothing_for_a_correct_run():
    assert breaches(truth(), {}) == ()


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_oracle_finds_every_falsified_result(lie: Callable[[RunObservation], RunObservation]):
    assert told_once(breaches(lie(truth()), {}))


def test_oracle_accepts_the_file_of_a_record_that_came_damaged_again():
    """A killed agent wrote it and did not commit; a file that was dropped for space is a lie."""
    lives = {SESSION: truth().lives[0]}
    damaged = with_row(truth(), 0, fate="dropped", reason="corrupted", path="")
    assert [*stored(damaged, lives, {})] == []
    refused = with_row(truth(), 0, fate="dropped", reason="disk_full", path="")
    assert [*stored(refused, lives, {})]


def test_oracle_accepts_an_unreadable_file_of_a_killed_agent_only():
    """A disk that fails does not show whose file it is; without a kill nobody else wrote it."""
    lives = {SESSION: truth().lives[0]}
    unread = with_row(truth(), 0, fate="dropped", reason="write_error", path="")
    assert [*stored(unread, lives, {"eio": 1, "kill_worker": 1})] == []
    assert [*stored(unread, lives, {"eio": 1})]


def test_oracle_accepts_a_drop_explained_by_a_fault():
    """Law: it needs its word, its fault, its place in the balance, and no file."""
    seen = lost_file(with_row(truth(), 0, fate="dropped", reason="disk_full", path=""))
    first = seen.manifests[0]
    told = replace(first, kept=DUE - 1, dropped={"disk_full": 1}, paths=first.paths[1:])
    balances = {**seen.balances, (SESSION, 0): (DUE, DUE - 1, 1)}
    seen = replace(seen, manifests=(told, *seen.manifests[1:]), balances=balances)
    assert breaches(seen, {"enospc": 1}) == ()
    assert breaches(seen, {"eio": 1})


def test_oracle_accepts_late_operators_missing_from_the_order():
    late = {(0, i): OPERATORS for i in range(ITERATIONS)}
    assert breaches(replace(truth(), placed={}, late=late), {}) == ()


def test_oracle_reports_more_corrupted_records_than_flips():
    seen = truth()
    for at in range(2):
        seen = with_row(seen, at, fate="dropped", reason="corrupted", path="")
    said = told_once(breaches(replace(seen, files=seen.files[2:]), {"flipped_chunk": 1}))
    assert any("1 bytes were flipped" in line for line in said)


def test_oracle_counts_many_breaches_of_a_law():
    said = told_once(breaches(replace(truth(), files=()), {}))
    assert any("more" in line for line in said)
    assert len(said) < 80
