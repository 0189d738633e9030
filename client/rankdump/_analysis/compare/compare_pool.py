"""Pool of processes that compares all pairs of tensors. Pairs that need no file are compared at
once, the rest in this process and in workers beside it; or as tasks of a Dask cluster, for trees
that one machine cannot read in time.

This process compares from the beginning, while the workers are still starting. A worker that died
is replaced, and the pairs of its lost group are tried one by one. On one machine, each process
needs memory for the largest pair.

A worker is a separate Python process that imports this module and nothing of the caller's: a
process of `multiprocessing` would import the caller's script again, which may be a training. The
worker reads from a pipe, and ends when the other end is closed.

The workers of a cluster open the files themselves. They need the trees at the same paths, on a
shared disk, and need rankdump to be installed. `distributed` is imported only when a cluster is
used.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from rankdump._analysis.compare.pair_comparison import (
    GroupOutcomes,
    PairGroup,
    compare_group,
    count_pair_bytes,
    decide_without_reading,
    group_pairs,
    mark_group_unreadable,
)
from rankdump._analysis.compare.report import (
    NOT_COMPARED,
    ComparisonSettings,
    DumpedTensor,
    PairOutcome,
    TensorPair,
)
from rankdump.errors import ConfigError, UnavailableError, UnsupportedError

SERVE_IMPORT = f"from {__name__} import serve"
"""Python code with which a worker process imports its main function."""

ComparisonProgress: TypeAlias = Callable[[int, int], None]
"""Function that takes the number of compared pairs and the total; called in the caller's thread."""
_MIN_BYTES_PER_WORKER = 512 << 20
_MIN_PAIRS_PER_WORKER = 4000
"""Smallest number of pairs for which another process is started: starting it takes a core half as
long as comparing them.
"""


class CompareWorker:
    """A worker process, which starts when the object is created; for one thread."""

    def __init__(self) -> None:
        own, other = Pipe()
        with other:
            path = f"import sys; sys.path[:] = {sys.path!r}"
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"{path}; {SERVE_IMPORT}; serve({other.fileno()})"],
                pass_fds=(other.fileno(),),
                stdin=subprocess.DEVNULL,
                # A new session: an interrupt from the terminal reaches only the caller, which then
                # ends this process.
                start_new_session=True,
            )
        self._pipe: Connection[Any, Any] = own

    def wait_until_ready(self) -> bool:
        """Wait until the process can compare; return whether it has started."""
        try:
            return self._pipe.recv() is None
        except (EOFError, OSError):
            return False

    def compare(self, group: PairGroup, settings: ComparisonSettings) -> GroupOutcomes | None:
        """Return the outcomes of a group; None when the process died or was ended before it
        answered.

        An error in the process is raised here.
        """
        try:
            self._pipe.send((group, settings))
            answer: GroupOutcomes | Exception = self._pipe.recv()
        except (EOFError, OSError):
            return None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self) -> None:
        """Kill the process, even while it is working; safe to call from any thread."""
        self._process.kill()

    def close(self) -> None:
        """Close the pipe, which ends the process, and wait for its end."""
        self._pipe.close()
        self._process.wait()


def serve(descriptor: int) -> None:
    """Compare the groups that arrive over a pipe until the other end is closed."""
    pipe: Connection[Any, Any] = Connection(descriptor)
    try:
        pipe.send(None)
        while True:
            group, settings = pipe.recv()
            try:
                answer = compare_group(group, settings)
            # the caller raises it, because only the caller knows which pairs were compared
            except Exception as error:
                answer = error
            pipe.send(answer)
    except (EOFError, OSError):
        return


class ComparePool:
    """Compares all groups, each once; `run` may be called only once."""

    def __init__(self, groups: Iterable[PairGroup], settings: ComparisonSettings) -> None:
        self._settings = settings
        self._waiting = deque(groups)
        self._lost: deque[PairGroup] = deque()
        """Groups of workers that died; other workers try them again, but this process does not."""
        self._answers: SimpleQueue[GroupOutcomes | BaseException | None] = SimpleQueue()
        """Outcomes from the threads of the workers; the last item of each thread is None."""
        self._busy = 0
        """Number of threads that have not ended."""
        self._lock = Lock()
        self._workers: set[CompareWorker] = set()
        self._stopped = False

    def run(self, workers: int) -> Iterator[GroupOutcomes]:
        """Yield the outcomes of all groups, with `workers` workers beside this process.

        An interrupt, or closing the iterator, ends the workers even while they are working.
        """
        threads = [
            Thread(target=self._run_workers, name=f"rankdump-diff-{number}")
            for number in range(workers)
        ]
        for thread in threads:
            thread.start()
        self._busy = workers
        try:
            yield from self._compare_in_this_process()
            yield from self._take_answers(waits=True)
            # Groups of a worker that died are left if no worker could be started after it.
            while (group := _pop_group(self._lost)) is not None:
                yield mark_group_unreadable(group)
        finally:
            self._stop()
            for thread in threads:
                thread.join()

    def _compare_in_this_process(self) -> Iterator[GroupOutcomes]:
        while (group := _pop_group(self._waiting)) is not None:
            yield compare_group(group, self._settings)
            yield from self._take_answers(waits=False)

    def _take_answers(self, *, waits: bool) -> Iterator[GroupOutcomes]:
        """Yield the outcomes from the threads; with `waits`, until all threads have ended."""
        while self._busy and (waits or not self._answers.empty()):
            answer = self._answers.get()
            if isinstance(answer, BaseException):
                raise answer
            if answer is None:
                self._busy -= 1
            else:
                yield answer

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            for worker in self._workers:
                worker.kill()

    def _run_workers(self) -> None:
        """Run workers one after the other."""
        try:
            while self._run_worker():
                pass
        except BaseException as error:
            self._answers.put(error)
        finally:
            self._answers.put(None)

    def _run_worker(self) -> bool:
        """Run a worker until no group is left or the worker dies; return whether to start another
        one.
        """
        with closing(CompareWorker()) as worker:
            with self._lock:
                self._workers.add(worker)
                stopped = self._stopped
            try:
                return not stopped and worker.wait_until_ready() and self._feed_worker(worker)
            finally:
                with self._lock:
                    self._workers.remove(worker)

    def _feed_worker(self, worker: CompareWorker) -> bool:
        while (group := _pop_group(self._lost) or _pop_group(self._waiting)) is not None:
            answers = worker.compare(group, self._settings)
            if self._stopped:
                return False
            if answers is None:
                if len(group) == 1:
                    self._answers.put(mark_group_unreadable(group))
                else:
                    # Only a pair that was alone in its group is certain to have killed the worker.
                    self._lost.extend([placed] for placed in group)
                return True
            self._answers.put(answers)
        return False


def _pop_group(groups: deque[PairGroup]) -> PairGroup | None:
    try:
        return groups.popleft()
    except IndexError:
        return None


def compare_pairs(
    pairs: Sequence[TensorPair],
    settings: ComparisonSettings,
    *,
    processes: int | None = None,
    dask: str = "",
    progress: ComparisonProgress | None = None,
) -> list[PairOutcome]:
    """Return the outcome of each pair, in the order of the pairs.

    At most `processes` processes compare, including this one; by default one for each core. With
    the address of a Dask scheduler, its workers compare instead: ConfigError without `distributed`,
    UnavailableError when nobody answers at the address.
    """
    outcomes, count = [NOT_COMPARED] * len(pairs), 0
    with closing(_yield_outcomes(pairs, settings, processes, dask)) as found:
        for answers in found:
            for place, outcome in answers:
                outcomes[place] = outcome
            count += len(answers)
            if progress is not None and answers:
                progress(count, len(outcomes))
    return outcomes


def _yield_outcomes(
    pairs: Sequence[TensorPair], settings: ComparisonSettings, processes: int | None, dask: str
) -> Generator[GroupOutcomes]:
    """Yield outcomes as soon as they are known; first those of pairs that need no file."""
    unread: list[tuple[int, TensorPair]] = []
    decided: GroupOutcomes = []
    for place, pair in enumerate(pairs):
        outcome = decide_without_reading(pair, settings)
        if outcome is None:
            unread.append((place, pair))
        else:
            decided.append((place, outcome))
    yield decided
    if dask:
        yield from _compare_on_cluster(dask, unread, settings)
    elif unread:
        workers = _choose_worker_count([pair for _, pair in unread], processes)
        yield from ComparePool(group_pairs(unread), settings).run(workers)


def _choose_worker_count(pairs: Sequence[TensorPair], processes: int | None) -> int:
    """Return the number of worker processes that are worth starting beside this one."""
    worth = max(
        sum(map(count_pair_bytes, pairs)) // _MIN_BYTES_PER_WORKER,
        len(pairs) // _MIN_PAIRS_PER_WORKER,
    )
    most = processes if processes is not None else len(os.sched_getaffinity(0))
    return max(0, min(most - 1, worth, len(pairs) - 1))


if TYPE_CHECKING:
    from distributed import Client

_CONNECT_TIMEOUT_S = 10
_GROUPS_PER_THREAD = 2
"""Number of groups that are submitted for each thread of the cluster: the one in progress, and the
next one.
"""
_WORKER_REQUIREMENTS = (
    "Dask workers need rankdump installed, and the trees at the same paths as here"
)


def _compare_on_cluster(
    address: str,
    placed: Iterable[tuple[int, TensorPair]],
    settings: ComparisonSettings,
) -> Iterator[GroupOutcomes]:
    """Compare pairs, each with its position among all pairs, on the cluster of a scheduler.

    ConfigError without the library for the cluster, UnavailableError when nobody answers at the
    address.
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
    pairs = {
        place: TensorPair(_make_absolute(pair.a), _make_absolute(pair.b)) for place, pair in placed
    }
    with client, client.as_current():
        for answers in _yield_group_outcomes(client, group_pairs(pairs.items()), settings):
            yield [
                (place, _explain_missing_file(outcome, pairs[place])) for place, outcome in answers
            ]


def _yield_group_outcomes(
    client: Client, groups: Iterator[PairGroup], settings: ComparisonSettings
) -> Iterator[GroupOutcomes]:
    """Yield outcomes as soon as they are known; only as many groups are submitted as the workers
    can use.
    """
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
            # Only a pair that was alone in its group is certain to have killed its worker.
            for placed in group:
                hand_out([placed])
        else:
            yield answers
        following = next(groups, None)
        if following is not None:
            hand_out(following)


def _get_task_outcomes(future: Any, group: PairGroup) -> GroupOutcomes | None:
    """Return the result of a task; None for a group that has to be tried pair by pair."""
    from distributed import KilledWorker

    try:
        return future.result()
    except KilledWorker:
        return mark_group_unreadable(group) if len(group) == 1 else None
    except ImportError as error:
        raise UnsupportedError(
            f"a Dask worker cannot compare: {error}; {_WORKER_REQUIREMENTS}"
        ) from None


def _make_absolute(tensor: DumpedTensor | None) -> DumpedTensor | None:
    """Return a tensor with an absolute path, so that any working folder finds its file."""
    if tensor is None or tensor.entry is None:
        return tensor
    return tensor._replace(entry=tensor.entry._replace(root=tensor.entry.root.absolute()))


def _explain_missing_file(outcome: PairOutcome, pair: TensorPair) -> PairOutcome:
    """If a worker does not find a file that exists here, return an outcome that explains the
    problem.
    """
    missing = any(os.strerror(errno.ENOENT) in finding for finding in outcome.findings)
    entries = [tensor.entry for tensor in (pair.a, pair.b) if tensor is not None]
    if not missing or not all(entry is None or entry.path.exists() for entry in entries):
        return outcome
    return replace(outcome, findings=(*outcome.findings, _WORKER_REQUIREMENTS))
