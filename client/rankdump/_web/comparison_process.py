"""Processes that compare trees. Only one compares at a time. The latest processes are kept, each
with its report, and answer requests for pages of rows. The server itself has no rows in memory.
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
"""Largest number of processes with a report that are kept."""
_ANSWER_TIMEOUT_S = 10.0
_NICE = 5
"""Niceness of comparisons, so that pages have priority if there are few cores."""
_NO_MEMORY = "the comparison needs more memory than a page may use: use rankdump diff"


class ComparisonRequest(NamedTuple):
    """Parts of trees to compare, with the settings; `b` is the reference."""

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
    """Tree of a run that should agree with b; its errors are the tolerances."""
    rtol: float | None = None
    atol: float | None = None
    tolerance: tuple[str, ...] = ()
    """Largest normal errors by name, as `PATTERN=ERROR`."""
    mapping: tuple[tuple[str, str], ...] = ()
    """Pairs of a name on side a and the name on side b that it corresponds to."""
    unshard: bool | None = None
    """Whether ranks are joined; None for the default of `compare`."""


class ComparisonState(NamedTuple):
    """Progress of a comparison, and its result so far."""

    state: str
    """`waiting` for another comparison, `running`, `ready` or `failed`."""
    done: int = 0
    """Number of pairs of tensors that have been compared."""
    total: int = 0
    """Number of all pairs; 0 while the trees are being read."""
    seconds: float = 0.0
    """Seconds since the comparison began."""
    failure: str = ""
    summary: ComparisonSummary | None = None
    excerpt: RowExcerpt | None = None


_OWN_SETTINGS = (
    *("rank_a", "rank_b", "iteration_a", "iteration_b", "attempt_a", "attempt_b"),
    *("rtol", "atol", "unshard"),
)
"""Fields that are passed to `compare` unchanged."""
_Stamps = tuple[tuple[int, ...], ...]


class _ComparisonFailure(NamedTuple):
    text: str


class _KeptComparison:
    """One process with its answer so far."""

    def __init__(self, request: ComparisonRequest, timeout_s: float) -> None:
        self.stamps = _read_stamps(request)
        self.began_s = time.monotonic()
        self.progress: MutableSequence[int] = SPAWN.Array("q", 2, lock=False)
        self.answer: ComparisonSummary | _ComparisonFailure | None = None
        self.is_shown = False
        self.process = LimitedProcess(serve_comparison, request, self.progress, timeout_s)
        self._timeout_s = timeout_s

    def is_running(self) -> bool:
        """Return whether the process has not answered yet; fetches the answer if there is one."""
        if self.answer is None and (self.process.pipe.poll() or not self.process.is_alive):
            try:
                self.answer = self.process.pipe.recv()
            except (EOFError, OSError):
                self.answer = _ComparisonFailure(self._explain_end())
        return self.answer is None

    def select(self, wanted: RowSelection) -> RowExcerpt | None:
        """Return rows of the report; None if the process has ended."""
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
    """Starts comparisons, one at a time, and keeps the latest ones until their trees change."""

    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._kept: OrderedDict[ComparisonRequest, _KeptComparison] = OrderedDict()

    def look(self, request: ComparisonRequest, wanted: RowSelection) -> ComparisonState:
        """Return the state of a comparison, without waiting for it; the first call starts the
        comparison.

        A result is returned at least once. After that, the trees are compared again if one of them
        has changed, unless rows of a later page are wanted. CorruptedError for a tree that is gone.
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
    """Compare, then answer requests for rows until the other side closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the server
    os.nice(_NICE)
    leave_pandas_out()
    limit_address_space(MEMORY_BYTES)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)  # the signal ends this process
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
    """Compare in this process and return the view of the report; raises the same errors as
    `compare`.
    """
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
        processes=1,  # a process that ends with its server may not have child processes
        progress=report_progress,
    )
    parts = (
        _find_part(a, request.job_a, request.attempt_a),
        _find_part(b, request.job_b, request.attempt_b),
    )
    return ComparisonView(report, parts)


def _find_part(dump: Dump, job: str, attempt: int | None) -> JobAttempt:
    """Return the attempt that `compare` chooses: the last one, if there are several."""
    if attempt is None and dump.has_several_attempts:
        attempt = dump.attempts[-1]
    return JobAttempt(job, attempt)
