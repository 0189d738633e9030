"""Runs of an ingest, once over a folder or as long as a job writes to it: as a command with
signals, progress and an exit code, or as a component of an agent.

Failures of the component are logged and retried; they neither end nor delay the agent.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from rankdump.errors import RankdumpError
from rankdumpd.ingest.dump_file import IngestCounts, IngestTask
from rankdumpd.ingest.engine import IngestEngine
from rankdumpd.server.background_thread import BackgroundThread
from rankdumpd.server.lifecycle import Component, SignalWaiter

if TYPE_CHECKING:
    from rankdumpd.ingest.folder_watch import FolderFollower


class IngestRun:
    """One run of an ingest; it owns its tree from its creation until `run` returns."""

    def __init__(
        self,
        task: IngestTask,
        *,
        report: Callable[[str], None],
        follow: bool = False,
        until_idle_s: float | None = None,
    ) -> None:
        """`report` is called with each skipped file. ConfigError when the ingest cannot begin."""
        self._asked, self._aborted = threading.Event(), threading.Event()
        self._engine = IngestEngine(task, report=report, stopping=self._aborted.is_set)
        self._follower: FolderFollower | None = None
        if follow or until_idle_s is not None:
            # Imported only here: it needs inotify, which a single run over a folder does not use.
            from rankdumpd.ingest.folder_watch import FolderFollower

            try:
                self._follower = FolderFollower(
                    self._engine, stopping=self._asked.is_set, until_idle_s=until_idle_s
                )
            except BaseException:
                self._engine.close()
                raise

    @property
    def counts(self) -> IngestCounts:
        """Counts of this run; may be read from any thread."""
        return self._engine.counts

    def run(self) -> bool:
        """Ingest existing and new files; return whether the run was completed."""
        try:
            if self._follower:
                self._follower.run()
            self._engine.ingest_all(self._aborted.wait, first=self._follower is None)
            if not self._aborted.is_set():
                self._engine.finish(self._aborted.wait)
        finally:
            if self._follower:
                self._follower.close()
            self._engine.close()
        return not self._aborted.is_set()

    def request_end(self) -> None:
        """Request the end of the run: a run that follows a folder ends after a last scan, any other
        at once.
        """
        self._asked.set()
        if self._follower:
            self._follower.wake()
        else:
            self.abort()

    def abort(self) -> None:
        """Request the run to begin no more files."""
        self._aborted.set()
        self._asked.set()
        if self._follower:
            self._follower.wake()


INGEST_RETRY_S = 10.0
"""Seconds between a failure and the next attempt; before the first job the folder may not exist."""
INGEST_LOG_INTERVAL_S = 60.0
"""Seconds between log lines about new files."""
_STOP_TIMEOUT_S = 10.0

_logger = logging.getLogger(__name__)


class IngestComponent(Component):
    """Ingests one folder of the agent's settings from `start` to `drain`."""

    max_stop_s = Component.max_stop_s + _STOP_TIMEOUT_S

    def __init__(
        self,
        task: IngestTask,
        *,
        retry_s: float = INGEST_RETRY_S,
        log_interval_s: float = INGEST_LOG_INTERVAL_S,
    ) -> None:
        self._task, self._retry_s, self._log_interval_s = task, retry_s, log_interval_s
        self._run: IngestRun | None = None
        self._logged, self._trouble = IngestCounts(), ""
        self._lock = threading.Lock()
        self._following = BackgroundThread(self._follow, "rankdumpd-ingest")
        self._logging = BackgroundThread(self._log_progress, "rankdumpd-ingest-log")

    def start(self) -> None:
        """Start to follow the folder."""
        self._following.start()
        self._logging.start()

    def drain(self, timeout_s: float) -> int:
        """Finish after a last scan; return 1 if the scan takes longer than `timeout_s`, else 0."""
        self._request_end(at_once=False)
        return int(not self._following.join(timeout_s))

    def stop(self) -> None:
        """Finish the files that were begun, and begin no others; may be repeated."""
        self._request_end(at_once=True)
        self._following.join(_STOP_TIMEOUT_S)

    def fault(self) -> str:
        """Return why the folder is no longer followed; empty while it is."""
        fault = self._following.fault()
        return f"{self._task.source} is no longer followed: {fault}" if fault else ""

    def _request_end(self, *, at_once: bool) -> None:
        self._following.request_stop()
        self._logging.request_stop()
        with self._lock:
            if self._run:
                (self._run.abort if at_once else self._run.request_end)()

    def _follow(self) -> None:
        while not self._following.is_stopping:
            try:
                self._follow_once()
            except RankdumpError as error:
                self._log_trouble(str(error))
            except Exception:
                _logger.exception("the ingest of %s failed", self._task.source)
            self._following.wait(self._retry_s)

    def _follow_once(self) -> None:
        run = IngestRun(self._task, report=self._warn, follow=True)
        _logger.info(
            "following the folder %s and ingesting it into %s", self._task.source, self._task.tree
        )
        self._trouble = ""
        with self._lock:
            self._run, self._logged = run, IngestCounts()
            if self._following.is_stopping:
                run.request_end()
        try:
            run.run()
        finally:
            with self._lock:
                self._run = None
            self._log_counts(run)

    def _log_trouble(self, text: str) -> None:
        """Log why the ingest cannot start, once for as long as the reason stays the same."""
        if text != self._trouble:
            self._trouble = text
            _logger.error("cannot ingest %s: %s", self._task.source, text)

    def _warn(self, text: str) -> None:
        _logger.warning("skipped a file in %s: %s", self._task.source, text)

    def _log_progress(self) -> None:
        while not self._logging.wait(self._log_interval_s):
            with self._lock:
                run = self._run
            if run:
                self._log_counts(run)

    def _log_counts(self, run: IngestRun) -> None:
        counts = run.counts
        if (counts.files, counts.failed) != (self._logged.files, self._logged.failed):
            self._logged = counts
            _logger.info(
                "ingested %d files: %d bytes read, %d bytes stored, %d files stored as links; "
                "%d files failed",
                counts.files,
                counts.bytes_in,
                counts.bytes_stored,
                counts.linked,
                counts.failed,
            )


_PROGRESS_INTERVAL_S = 0.2
_EXIT_DONE, _EXIT_FAILED = 0, 1


def run_ingest(
    task: IngestTask, *, follow: bool, until_idle_s: float | None, progress: bool
) -> int:
    """Run an ingest until it ends or a signal ends it; return the exit code of the process.

    With `progress`, JSON lines on standard output report `counts` while the run goes on, `left` for
    each skipped file, and `done` at the end.
    """
    signals = SignalWaiter()
    try:
        report = _print_skipped_file if progress else _log_skipped_file
        run = IngestRun(task, report=report, follow=follow, until_idle_s=until_idle_s)
        whole = _run_until(signals, run, progress=progress)
    finally:
        signals.close()
    return _report_end(run.counts, whole=whole, progress=progress)


def _run_until(signals: SignalWaiter, run: IngestRun, *, progress: bool) -> bool:
    """Run an ingest in a second thread while this one waits for signals; return whether the run
    completed.
    """
    completed: list[bool] = []

    def work() -> None:
        try:
            completed.append(run.run())
        except RankdumpError as error:
            _logger.error("%s", error)
        finally:
            reporting.request_stop()
            signals.request()

    def report() -> None:
        while not reporting.wait(_PROGRESS_INTERVAL_S):
            _print_json({"counts": asdict(run.counts)})

    ingesting = BackgroundThread(work, "rankdumpd-ingest")
    reporting = BackgroundThread(report, "rankdumpd-ingest-progress")
    if progress:
        reporting.start()
    ingesting.start()
    signals.wait()
    run.request_end()
    ingesting.join()
    return completed == [True]


def _report_end(counts: IngestCounts, *, whole: bool, progress: bool) -> int:
    if progress:
        _print_json({"done": asdict(counts), "whole": whole})
    else:
        _logger.info("%s", ", ".join(f"{name} {count}" for name, count in asdict(counts).items()))
    return _EXIT_DONE if whole and not counts.failed else _EXIT_FAILED


def _log_skipped_file(text: str) -> None:
    _logger.warning("skipped %s", text)


def _print_skipped_file(text: str) -> None:
    _print_json({"left": text})


def _print_json(what: dict[str, object]) -> None:
    try:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()
    except OSError:
        return  # the reader of the output is gone
