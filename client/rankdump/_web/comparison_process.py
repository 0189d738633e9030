"""Processes that compare trees: one compares at a time, and the latest ones stay, each with its
report, and answer with pages of its rows. The server itself holds no rows.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import MutableSequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rankdump._core.pandas_blocker import leave_pandas_out
from rankdump._core.tolerance_text import parse_tolerances
from rankdump._web.comparison_view import (
    ComparisonSummary,
    ComparisonView,
    RowExcerpt,
    RowSelection,
)
from rankdump._web.dump_source import JobAttempt, read_tree_stamp
from rankdump._web.limited_process import SPAWN, LimitedProcess, limit_address_space
from rankdump.errors import RankdumpError

if TYPE_CHECKING:
    from rankdump._analysis.reader.dump import Dump

TIMEOUT_S = 600.0
MEMORY_BYTES = 2 << 30
MAX_KEPT = 2
"""Processes with a report that are kept."""
_ANSWER_TIMEOUT_S = 10.0
_NICE = 5
"""Pages come before comparisons where processors are few."""
_NO_MEMORY = "the comparison needs more memory than a page may use: use rankdump diff"


class ComparisonRequest(NamedTuple):
    """Which parts of which trees are compared; `b` is the reference."""

    a: Path
    b: Path
    rank_a: int | None = None
    rank_b: int | None = None
    iteration_a: int | None = None
    iteration_b: int | None = None
    attempt_a: int | None = None
    attempt_b: int | None = None
    job_a: str = ""
    job_b: str = ""
    noise: Path | None = None
    """A run that should agree with b; its errors are the tolerances."""
    rtol: float | None = None
    atol: float | None = None
    tolerance: tuple[str, ...] = ()
    """Largest normal errors by names, as `PATTERN=ERROR`."""
    mapping: tuple[tuple[str, str], ...] = ()
    """Names of a with those of b that they are paired with."""
    unshard: bool | None = None
    """Whether ranks are joined; None for the default of `compare`."""


class ComparisonState(NamedTuple):
    """How far a comparison is, and what is known of it."""

    state: str
    """`waiting` for another one, `running`, `ready` or `failed`."""
    done: int = 0
    """Pairs of tensors that are compared."""
    total: int = 0
    """0 while the trees are read."""
    seconds: float = 0.0
    """Since it began."""
    failure: str = ""
    summary: ComparisonSummary | None = None
    excerpt: RowExcerpt | None = None


_OWN_SETTINGS = (
    *("rank_a", "rank_b", "iteration_a", "iteration_b", "attempt_a", "attempt_b"),
    *("rtol", "atol", "unshard"),
)
"""Fields that are arguments of `compare` as they are."""
_Stamps = tuple[tuple[int, ...], ...]


class _ComparisonFailure(NamedTuple):
    text: str


class _KeptComparison:
    """One process, and what it has said so far."""

    def __init__(self, request: ComparisonRequest, timeout_s: float) -> None:
        self.stamps = _read_stamps(request)
        self.began_s = time.monotonic()
        self.progress: MutableSequence[int] = SPAWN.Array("q", 2, lock=False)
        self.answer: ComparisonSummary | _ComparisonFailure | None = None
        self.is_shown = False
        self.process = LimitedProcess(serve_comparison, request, self.progress, timeout_s)
        self._timeout_s = timeout_s

    def is_running(self) -> bool:
        """Return whether it has no answer yet; takes one that is there."""
        if self.answer is None and (self.process.pipe.poll() or not self.process.is_alive):
            try:
                self.answer = self.process.pipe.recv()
            except (EOFError, OSError):
                self.answer = _ComparisonFailure(self._explain_end())
        return self.answer is None

    def select(self, wanted: RowSelection) -> RowExcerpt | None:
        """Return rows of the report; None when the process has ended."""
        try:
            self.process.pipe.send(wanted)
            if self.process.pipe.poll(_ANSWER_TIMEOUT_S):
                return self.process.pipe.recv()
        except (EOFError, OSError):
            pass
        self.answer = _ComparisonFailure("the process with the report has ended: compare again")
        return None

    def _explain_end(self) -> str:
        code = self.process.wait_until_ended()
        if code == -signal.SIGALRM:
            return f"the comparison took longer than {self._timeout_s:g} s: use rankdump diff"
        known = "the terminal of rankdump web has the reason"
        return _NO_MEMORY if code == -signal.SIGKILL else f"the comparison failed; {known}"


class ComparisonProcesses:
    """Starts comparisons, one at a time, and keeps the latest until their trees change."""

    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._kept: OrderedDict[ComparisonRequest, _KeptComparison] = OrderedDict()

    def look(self, request: ComparisonRequest, wanted: RowSelection) -> ComparisonState:
        """Return how far a comparison is, without waiting for it; it begins with the first look.

        A result is shown once in any case. After that, it is compared again when a tree has
        changed, unless the rows of a later page are wanted. CorruptedError for a tree that is gone.
        """
        with self._lock:
            found = self._kept.get(request)
            if found is not None and _is_over(found, request, wanted):
                self._drop(request)
                found = None
            if found is None:
                if any(other.is_running() for other in self._kept.values()):
                    return ComparisonState("waiting")
                found = _KeptComparison(request, self._timeout_s)
                self._kept[request] = found
            self._kept.move_to_end(request)
            while len(self._kept) > MAX_KEPT:
                self._drop(next(iter(self._kept)))
            return _describe(found, wanted)

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            for request in tuple(self._kept):
                self._drop(request)

    def _drop(self, request: ComparisonRequest) -> None:
        self._kept.pop(request).process.stop()


def _is_over(found: _KeptComparison, request: ComparisonRequest, wanted: RowSelection) -> bool:
    if found.is_running() or not found.is_shown:
        return False
    has_failed = isinstance(found.answer, _ComparisonFailure)
    return has_failed or (not wanted.row and found.stamps != _read_stamps(request))


def _describe(found: _KeptComparison, wanted: RowSelection) -> ComparisonState:
    seconds = time.monotonic() - found.began_s
    if found.is_running():
        return ComparisonState("running", found.progress[0], found.progress[1], seconds)
    found.is_shown = True
    excerpt = found.select(wanted) if isinstance(found.answer, ComparisonSummary) else None
    if isinstance(found.answer, _ComparisonFailure):
        return ComparisonState("failed", failure=found.answer.text)
    return ComparisonState("ready", summary=found.answer, excerpt=excerpt)


def _read_stamps(request: ComparisonRequest) -> _Stamps:
    roots = (request.a, request.b, request.noise)
    return tuple(read_tree_stamp(root) for root in roots if root is not None)


def serve_comparison(
    pipe: Connection, request: ComparisonRequest, progress: MutableSequence[int], timeout_s: float
) -> None:
    """Compare, then answer with rows until the other side closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server
    os.nice(_NICE)
    leave_pandas_out()
    limit_address_space(MEMORY_BYTES)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)  # ends this process
    try:
        view = compare_request(request, progress)
    except RankdumpError as error:
        pipe.send(_ComparisonFailure(" ".join(str(error).split())))
        return
    except OSError as error:
        pipe.send(_ComparisonFailure(f"cannot be read: {error}"))
        return
    except MemoryError:
        pipe.send(_ComparisonFailure(_NO_MEMORY))
        return
    pipe.send(view.summarize())
    signal.setitimer(signal.ITIMER_REAL, 0)
    while True:
        try:
            wanted = pipe.recv()
        except EOFError:
            return
        pipe.send(view.select(wanted))


def compare_request(request: ComparisonRequest, progress: MutableSequence[int]) -> ComparisonView:
    """Return the view of a comparison in this process; raises what `compare` does."""
    from rankdump._analysis.compare.comparison import compare
    from rankdump._analysis.reader.dump import open_dump

    def report_progress(done: int, total: int) -> None:
        progress[0], progress[1] = done, total

    opened = {root: open_dump(root) for root in (request.a, request.b)}
    a = opened[request.a].of_job(request.job_a)
    b = opened[request.b].of_job(request.job_b)
    own: dict[str, Any] = {name: getattr(request, name) for name in _OWN_SETTINGS}
    report = compare(
        *(a, b),
        **own,
        mapping=dict(request.mapping) or None,
        tolerance=parse_tolerances(request.tolerance),
        noise=() if request.noise is None else (request.noise,),
        processes=1,  # a process that ends with its server may have none below it
        progress=report_progress,
    )
    parts = (
        _find_part(a, request.job_a, request.attempt_a),
        _find_part(b, request.job_b, request.attempt_b),
    )
    return ComparisonView(report, parts)


def _find_part(dump: Dump, job: str, attempt: int | None) -> JobAttempt:
    """Return which attempt `compare` has chosen: the last one, where there are several."""
    if attempt is None and dump.has_several_attempts:
        attempt = dump.attempts[-1]
    return JobAttempt(job, attempt)
