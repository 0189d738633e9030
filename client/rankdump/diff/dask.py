"""The same groups as tasks of a Dask cluster, for trees that one machine cannot read in time.

Its workers open the files themselves: they need the trees at the same paths, on a shared disk, and
rankdump installed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from rankdump.contract.errors import ConfigError, UnavailableError, UnsupportedError
from rankdump.diff.groups import Answers, Group, compare_group, given_up, groups_of
from rankdump.diff.values import Outcome, Settings, Tensor, TensorPair

if TYPE_CHECKING:
    from distributed import Client

_PATIENCE_S = 10
_AHEAD = 2
"""Groups handed out for each thread of the cluster: what it has in hand, and what comes next."""
_NEEDS = "Dask workers need rankdump installed, and the trees at the same paths as here"


def compare_on(
    address: str,
    placed: Iterable[tuple[int, TensorPair]],
    settings: Settings,
    done: Callable[[Answers], None],
) -> None:
    """Compare pairs, each with its place among all, on the cluster of a scheduler.

    ConfigError without the library that speaks with it, UnavailableError when nobody answers.
    """
    try:
        from distributed import Client
    except ImportError:
        allowed = "after pip install 'rankdump[dask]', without which no cluster can be asked"
        raise ConfigError("--dask", "", address, allowed) from None
    try:
        client = Client(address, timeout=_PATIENCE_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise UnavailableError(f"no Dask scheduler answers at {address}: {error}") from None
    pairs = {place: _anywhere(pair) for place, pair in placed}
    with client, client.as_current():
        for answers in _compared(client, groups_of(pairs.items()), settings):
            done([(place, _explained(outcome, pairs[place])) for place, outcome in answers])


def _compared(client: Client, groups: Iterator[Group], settings: Settings) -> Iterator[Answers]:
    """Yield outcomes as they come; no more groups are under way than the workers have use for."""
    from distributed import as_completed

    held: dict[Any, Group] = {}
    finished: Any = as_completed()

    def hand_out(group: Group) -> None:
        future: Any = client.submit(compare_group, group, settings, pure=False)
        held[future] = group
        finished.add(future)

    threads = cast("dict[str, int]", client.nthreads())
    while len(held) < _AHEAD * max(1, sum(threads.values())):
        group = next(groups, None)
        if group is None:
            break
        hand_out(group)
    for future in finished:
        group = held.pop(future)
        answers = _answers(future, group)
        if answers is None:
            # Only a pair that was alone can be the one that killed its worker.
            for placed in group:
                hand_out([placed])
        else:
            yield answers
        following = next(groups, None)
        if following is not None:
            hand_out(following)


def _answers(future: Any, group: Group) -> Answers | None:
    """Return what a task gave; None for a group that has to be tried pair by pair."""
    from distributed import KilledWorker

    try:
        return future.result()
    except KilledWorker:
        return given_up(group) if len(group) == 1 else None
    except ImportError as error:
        raise UnsupportedError(f"a Dask worker cannot compare: {error}; {_NEEDS}") from None


def _anywhere(pair: TensorPair) -> TensorPair:
    """Return a pair whose files are found from any folder."""
    return TensorPair(_rooted(pair.a), _rooted(pair.b))


def _rooted(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or tensor.entry is None:
        return tensor
    return tensor._replace(entry=tensor.entry._replace(root=tensor.entry.root.absolute()))


def _explained(outcome: Outcome, pair: TensorPair) -> Outcome:
    """Return an outcome that says what is wrong where a worker misses a file that is there."""
    missing = any(os.strerror(errno.ENOENT) in finding for finding in outcome.findings)
    entries = [tensor.entry for tensor in (pair.a, pair.b) if tensor is not None]
    if not missing or not all(entry is None or entry.path.exists() for entry in entries):
        return outcome
    return replace(outcome, findings=(*outcome.findings, _NEEDS))
