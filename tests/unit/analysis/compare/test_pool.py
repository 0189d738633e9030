"""Pairs compared in this process and in others: the same outcomes in the same order."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest
from support.tensor_pairs import pair, path_of, tensor

from rankdump._analysis.compare import compare_pool, pair_comparison
from rankdump._analysis.compare.compare_pool import compare_pairs
from rankdump._analysis.compare.pair_comparison import compare_pair
from rankdump._analysis.compare.report import ComparisonSettings, TensorPair, TensorVerdict

SETTINGS = ComparisonSettings()


@pytest.fixture
def pairs(tmp_path):
    """Forty pairs of every sort, some of which no file decides."""
    numbers = np.random.default_rng(0)
    found = []
    for number in range(40):
        a = numbers.standard_normal((number, 5)).astype(np.float32)
        b = a if number % 3 else a * np.float32(1.1)
        found.append(pair(tmp_path, f"{number}", a, b, codec="zstd" if number % 2 else "none"))
    path_of(found[7].b).write_bytes(b"damaged")
    found[11] = TensorPair(found[11].a, None)
    same = tensor(tmp_path, "same", np.ones(3), digest=True)
    found[13] = TensorPair(same, same)
    return found


@pytest.fixture
def many_small_groups(monkeypatch):
    """As if each pair were a gigabyte."""
    monkeypatch.setattr(pair_comparison, "_MAX_GROUP_PAIRS", 2)
    monkeypatch.setattr(compare_pool, "_MIN_PAIRS_PER_WORKER", 1)


@pytest.fixture
def workers_only(many_small_groups, monkeypatch):
    """This process compares nothing itself."""
    monkeypatch.setattr(compare_pool.ComparePool, "_compare_in_this_process", lambda self: ())


def shown(found):
    """NaN is not equal to itself; its text is."""
    return list(map(repr, found))


def test_pool_starts_no_process_for_small_jobs(pairs, monkeypatch):
    monkeypatch.setattr(compare_pool, "CompareWorker", None)
    alone = [compare_pair(each, SETTINGS) for each in pairs]
    assert shown(compare_pairs(pairs, SETTINGS, processes=8)) == shown(alone)
    assert {each.verdict for each in alone} >= {
        TensorVerdict.SAME,
        TensorVerdict.DIFFERENT,
        TensorVerdict.UNMATCHED,
        TensorVerdict.UNREADABLE,
    }


def test_workers_give_the_outcomes_of_one_process(pairs, workers_only):
    told = []
    found = compare_pairs(pairs, SETTINGS, processes=3, progress=lambda *done: told.append(done))
    assert shown(found) == shown(compare_pair(each, SETTINGS) for each in pairs)
    assert [total for _, total in told] == [40] * len(told)
    counts = [done for done, _ in told]
    assert counts == sorted(counts)
    assert counts[-1] == 40


def test_pool_compares_in_its_own_process_as_well(pairs, many_small_groups):
    found = compare_pairs(pairs, SETTINGS, processes=2)
    assert shown(found) == shown(compare_pair(each, SETTINGS) for each in pairs)


def test_pair_that_kills_its_worker_is_unreadable(pairs, tmp_path, workers_only, monkeypatch):
    """The pair that killed it is unreadable; those that were with it are compared again."""
    monkeypatch.setattr(compare_pool, "SERVE_IMPORT", "from support.dying_worker import serve")
    ones = np.ones(4, np.float32)
    pairs[20] = pair(tmp_path, "killer", ones, ones * 2)
    found = compare_pairs(pairs, SETTINGS, processes=2)
    assert found[20].verdict is TensorVerdict.UNREADABLE
    assert found[20].findings == (pair_comparison._WORKER_DIED,)
    del pairs[20], found[20]
    assert shown(found) == shown(compare_pair(each, SETTINGS) for each in pairs)


def test_pool_works_without_workers_that_fail_to_start(
    pairs, many_small_groups, monkeypatch, capfd
):
    """This process does it all then, and the reason is on stderr."""
    monkeypatch.setattr(compare_pool, "SERVE_IMPORT", "from support.dying_worker import nothing")
    found = compare_pairs(pairs, SETTINGS, processes=3)
    assert shown(found) == shown(compare_pair(each, SETTINGS) for each in pairs)
    assert "cannot import name 'nothing'" in capfd.readouterr().err


def test_internal_error_of_a_worker_is_raised(pairs, workers_only, monkeypatch):
    """What is no fault of a file ends the comparison, whichever process met it."""
    monkeypatch.setattr(compare_pool, "SERVE_IMPORT", "from support.failing_worker import serve")
    with pytest.raises(ZeroDivisionError):
        compare_pairs(pairs, SETTINGS, processes=2)


def test_interrupt_ends_the_workers(pairs, workers_only):
    """Ctrl-C is not waited for by what the workers have in hand."""
    stuck = path_of(pairs[3].a)
    stuck.unlink()
    # Whoever opens it to read waits for somebody who writes.
    os.mkfifo(stuck)
    seen = []

    def interrupt(done: int, total: int) -> None:
        seen.append(done)
        if len(seen) == 2:  # the first call is for pairs that no file decides
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        compare_pairs(pairs, SETTINGS, processes=3, progress=interrupt)
    assert len(seen) == 2
    assert not [each for each in threading.enumerate() if each.name.startswith("rankdump")]


def test_compare_pairs_of_an_empty_list():
    assert compare_pairs([], SETTINGS) == []
