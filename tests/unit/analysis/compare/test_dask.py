"""Comparison on a Dask cluster, with the outcomes of one machine."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from distributed import KilledWorker, LocalCluster
from support.tensor_pairs import pair, path_of

from rankdump._analysis.compare import pair_comparison
from rankdump._analysis.compare.compare_pool import (
    _WORKER_REQUIREMENTS,
    _explain_missing_file,
    _get_task_outcomes,
    compare_pairs,
)
from rankdump._analysis.compare.report import (
    ComparisonSettings,
    PairOutcome,
    TensorPair,
    TensorVerdict,
)
from rankdump.errors import ConfigError, UnavailableError, UnsupportedError

SETTINGS = ComparisonSettings(msaccucmp=True)


@pytest.fixture
def pairs(tmp_path):
    numbers = np.random.default_rng(0)
    found = []
    for number in range(20):
        a = numbers.standard_normal((number, 5)).astype(np.float32)
        found.append(pair(tmp_path, f"{number}", a, a if number % 3 else a * np.float32(1.1)))
    path_of(found[7].b).write_bytes(b"damaged")
    found[11] = TensorPair(found[11].a, None)
    return found


@pytest.mark.slow
def test_cluster_gives_the_outcomes_of_one_process(pairs, tmp_path, monkeypatch):
    """The same list as from one process, also when this one stands in another folder."""
    monkeypatch.setattr(pair_comparison, "_MAX_GROUP_PAIRS", 3)
    here = compare_pairs(pairs, SETTINGS, processes=1)
    monkeypatch.chdir("/")
    told = []
    started: Any = LocalCluster(
        n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=":0"
    )
    with started as cluster:
        monkeypatch.chdir(tmp_path)
        found = compare_pairs(
            [TensorPair(_from_here(each.a), _from_here(each.b)) for each in pairs],
            SETTINGS,
            dask=str(cluster.scheduler_address),
            progress=lambda *done: told.append(done),
        )
    assert list(map(repr, found)) == list(map(repr, here))
    assert told[-1] == (20, 20)


def _from_here(tensor):
    if tensor is None:
        return None
    root = tensor.entry.root
    return tensor._replace(entry=tensor.entry._replace(root=root.relative_to(root.parent)))


def test_cluster_without_a_scheduler_is_unavailable(pairs, monkeypatch):
    monkeypatch.setattr("rankdump._analysis.compare.compare_pool._CONNECT_TIMEOUT_S", 0.2)
    with pytest.raises(UnavailableError, match="no Dask scheduler answers at tcp"):
        compare_pairs(pairs, SETTINGS, dask="tcp://127.0.0.1:1")


def test_cluster_without_distributed_names_the_extra(pairs, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ConfigError, match=r"pip install 'rankdump\[dask\]'"):
        compare_pairs(pairs, SETTINGS, dask="tcp://127.0.0.1:1")


def test_worker_without_the_trees_is_named_in_the_findings(pairs):
    """A file that is here and not there is no damage of the tree."""
    missing = PairOutcome(
        TensorVerdict.UNREADABLE, ("x: cannot be read: No such file or directory",)
    )
    assert _explain_missing_file(missing, pairs[0]).findings[-1] == _WORKER_REQUIREMENTS
    path_of(pairs[0].a).unlink()
    assert _explain_missing_file(missing, pairs[0]) == missing
    damaged = PairOutcome(TensorVerdict.UNREADABLE, ("x: not an npy file",))
    assert _explain_missing_file(damaged, pairs[1]) == damaged


class Failed:
    """A task that gave no result."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> None:
        raise self._error


def test_pair_that_kills_workers_is_unreadable_and_others_are_compared(pairs):
    """Its pairs are tried one by one; the one that did it is unreadable."""
    nobody: Any = None
    killed = Failed(KilledWorker("compare_group-1", nobody, 3))
    group = list(enumerate(pairs[:2]))
    assert _get_task_outcomes(killed, group) is None
    [(place, outcome)] = _get_task_outcomes(killed, group[:1]) or []
    assert (place, outcome.verdict) == (0, TensorVerdict.UNREADABLE)


def test_worker_without_rankdump_is_an_error(pairs):
    missing = Failed(ModuleNotFoundError("No module named 'rankdump'"))
    with pytest.raises(UnsupportedError, match="cannot compare: No module named 'rankdump'; Dask"):
        _get_task_outcomes(missing, list(enumerate(pairs)))
