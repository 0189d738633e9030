"""Comparison of groups of pairs as tasks of a Dask cluster, for trees that one machine cannot read
in time.

The workers open the files themselves: they need the trees at the same paths, on a shared disk,
and rankdump installed. Imports `distributed` only when a cluster is used.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from rankdump._analysis.compare.pair_comparison import (
    GroupOutcomes,
    PairGroup,
    compare_group,
    group_pairs,
    mark_group_unreadable,
)
from rankdump._analysis.compare.report import (
    ComparisonSettings,
    DumpedTensor,
    PairOutcome,
    TensorPair,
)
from rankdump.errors import ConfigError, UnavailableError, UnsupportedError

if TYPE_CHECKING:
    from distributed import Client

_CONNECT_TIMEOUT_S = 10
_GROUPS_PER_THREAD = 2
"""Groups handed out for each thread of the cluster: what it has in hand, and what comes next."""
_WORKER_REQUIREMENTS = (
    "Dask workers need rankdump installed, and the trees at the same paths as here"
)


def compare_on_cluster(
    address: str,
    placed: Iterable[tuple[int, TensorPair]],
    settings: ComparisonSettings,
    done: Callable[[GroupOutcomes], None],
) -> None:
    """Compare pairs, each with its place among all, on the cluster of a scheduler.

    ConfigError without the library that speaks with it, UnavailableError when nobody answers.
    """
    try:
        from distributed import Client
    except ImportError:
        allowed = "an address once distributed is installed: pip install 'rankdump[dask]'"
        raise ConfigError("--dask", "", address, allowed) from None
    try:
        client = Client(address, timeout=_CONNECT_TIMEOUT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise UnavailableError(f"no Dask scheduler answers at {address}: {error}") from None
    pairs = {place: _make_pair_absolute(pair) for place, pair in placed}
    with client, client.as_current():
        for answers in _yield_group_outcomes(client, group_pairs(pairs.items()), settings):
            done(
                [
                    (place, _explain_missing_file(outcome, pairs[place]))
                    for place, outcome in answers
                ]
            )


def _yield_group_outcomes(
    client: Client, groups: Iterator[PairGroup], settings: ComparisonSettings
) -> Iterator[GroupOutcomes]:
    """Yield outcomes as they come; no more groups are under way than the workers have use for."""
    from distributed import as_completed

    held: dict[Any, PairGroup] = {}
    finished: Any = as_completed()

    def hand_out(group: PairGroup) -> None:
        future: Any = client.submit(compare_group, group, settings, pure=False)
        held[future] = group
        finished.add(future)

    threads = cast("dict[str, int]", client.nthreads())
    while len(held) < _GROUPS_PER_THREAD * max(1, sum(threads.values())):
        group = next(groups, None)
        if group is None:
            break
        hand_out(group)
    for future in finished:
        group = held.pop(future)
        answers = _get_task_outcomes(future, group)
        if answers is None:
            # Only a pair that was alone can be the one that killed its worker.
            for placed in group:
                hand_out([placed])
        else:
            yield answers
        following = next(groups, None)
        if following is not None:
            hand_out(following)


def _get_task_outcomes(future: Any, group: PairGroup) -> GroupOutcomes | None:
    """Return what a task gave; None for a group that has to be tried pair by pair."""
    from distributed import KilledWorker

    try:
        return future.result()
    except KilledWorker:
        return mark_group_unreadable(group) if len(group) == 1 else None
    except ImportError as error:
        raise UnsupportedError(
            f"a Dask worker cannot compare: {error}; {_WORKER_REQUIREMENTS}"
        ) from None


def _make_pair_absolute(pair: TensorPair) -> TensorPair:
    """Return a pair whose files are found from any folder."""
    return TensorPair(_make_tensor_absolute(pair.a), _make_tensor_absolute(pair.b))


def _make_tensor_absolute(tensor: DumpedTensor | None) -> DumpedTensor | None:
    if tensor is None or tensor.entry is None:
        return tensor
    return tensor._replace(entry=tensor.entry._replace(root=tensor.entry.root.absolute()))


def _explain_missing_file(outcome: PairOutcome, pair: TensorPair) -> PairOutcome:
    """Return an outcome that says what is wrong where a worker misses a file that is there."""
    missing = any(os.strerror(errno.ENOENT) in finding for finding in outcome.findings)
    entries = [tensor.entry for tensor in (pair.a, pair.b) if tensor is not None]
    if not missing or not all(entry is None or entry.path.exists() for entry in entries):
        return outcome
    return replace(outcome, findings=(*outcome.findings, _WORKER_REQUIREMENTS))
