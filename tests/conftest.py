"""What every test gets: no leaked threads or signals, short socket paths, a CI without skips."""

from __future__ import annotations

import gc
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import settings

import rankdump as rankdump  # before any test imports gRPC, as in a job

# How long an example takes says more of the machine than of the code.
settings.register_profile("no deadlines", deadline=None)
settings.register_profile("fast", deadline=None, max_examples=25)  # for `make test-fast`
settings.load_profile("no deadlines")

_FOR_TESTS = {
    # What daemons of tests do is not to depend on how full the disk of this machine is.
    "RANKDUMPD_AGENT__KEEP_FREE_RATIO": "0",
    "RANKDUMPD_AGENT__KEEP_FREE_INODES_RATIO": "0",
    # Tests of the table of statistics turn it on: a job of a second would take another for it.
    "RANKDUMPD_AGENT__TABLE": "false",
    # Every byte of a slab is written when a session begins, 256 MiB by default.
    "RANKDUMPD_AGENT__SLAB_BYTES": str(16 << 20),
    # Several tests run at a time; threads of a pool that wait for work take processors, too.
    "OMP_NUM_THREADS": "1",
}
"""Environment of all tests, and of what they start."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_COLLECTED_AFTER_OBJECTS = 10_000
"""Python's 700 take 5 s of processor time of unit tests more, and find the same."""

_PROCESSES = {"integration", "faults", "jobs"}
"""Folders of tests that start processes."""


@pytest.fixture(autouse=True)
def no_thread_leak() -> Iterator[None]:
    """Every thread a test starts must have ended soon after it."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 5.0
    while leaked := [t for t in set(threading.enumerate()) - before if _ours(t)]:
        if time.monotonic() > deadline:
            pytest.fail(f"threads left behind: {leaked}")
        time.sleep(0.01)


def _ours(thread: threading.Thread) -> bool:
    # gRPC polls in daemon threads of its own that outlive a channel by a moment.
    return thread.is_alive() and thread.name.startswith("rankdump")


@pytest.fixture(autouse=True)
def no_process_state_leak() -> Iterator[None]:
    """A test leaves this process as it was, also where a library changed it.

    Which tests share a process depends on the load: what one leaves behind reaches others.
    """
    environ, folder, thresholds = dict(os.environ), Path.cwd(), gc.get_threshold()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    address_space = resource.getrlimit(resource.RLIMIT_AS)
    yield
    if resource.getrlimit(resource.RLIMIT_AS) != address_space:
        resource.setrlimit(resource.RLIMIT_AS, address_space)
    if os.environ != environ:
        for name in os.environ.keys() - environ.keys():
            del os.environ[name]
        os.environ.update(environ)
    os.chdir(folder)
    gc.set_threshold(*thresholds)
    # A daemon in this process keeps pandas out of it.
    blocker = "rankdump._core.pandas_blocker"
    for at, finder in enumerate(sys.meta_path):
        if getattr(finder, "__module__", "") == blocker:
            sys.meta_path[at] = PathFinder
    for number, handler in handlers.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)
            signal.set_wakeup_fd(-1)


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """A private folder whose path is short enough for a Unix socket."""
    folder = Path(tempfile.mkdtemp(prefix="rd-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment and the signals of all tests, also for what a module shares."""
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(_BriefWorker())
    _leave_outer_job()
    os.environ.update(_FOR_TESTS)
    # A shell that starts pytest in the background ignores it, and so would what tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave_outer_job() -> None:
    """Hide the rank and the plan of a job that tests may run inside, and its terminal."""
    families = ("RANKDUMP", "MINDSPORE_DUMP", "MS_DIAGNOSTIC", "SLURM_", "OMPI_", "TORCHELASTIC")
    exact = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RANK_ID", "RANK_SIZE", "DEVICE_ID")
    exact += ("COLUMNS", "LINES")  # pytest-xdist tells its processes how wide the terminal is
    for name in list(os.environ):
        if name.startswith(families) or name in exact:
            del os.environ[name]


class _BriefWorker:
    """Sends one message for a test that passes, not five, from a process of pytest-xdist.

    The process that collects them took a twentieth of the processor time of unit tests.
    """

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Run one test; report its result, and what fails or is skipped before or after it."""
        for report in runtestprotocol(item, log=False, nextitem=nextitem):
            if report.when == "call" or not report.passed:
                item.ihook.pytest_runtest_logreport(report=report)
        return True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for cyclic garbage among what tests make, and not again and again in all modules.

    That took a tenth of the processor time of unit tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        _, second, third = gc.get_threshold()
        gc.set_threshold(_COLLECTED_AFTER_OBJECTS, second, third)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark by folder what starts processes; begin with slow modules, for they end last otherwise.

    A module stays together, so that what its tests share is made by one process of pytest-xdist.
    """
    for item in items:
        folder = _find_top_folder(item.path)
        if folder in _PROCESSES:
            item.add_marker("process")
        if folder == "torch":
            item.add_marker("torch")
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@cache
def _find_top_folder(path: Path) -> str:
    """Return the first folder below this one on the way to a module of tests."""
    return path.relative_to(Path(__file__).parent).parts[0]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """On CI nothing is skipped: what could not run was not shown to work."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    if reporter and os.environ.get("CI") == "true" and skipped and session.exitstatus == 0:
        reporter.write_line(f"CI=true and {len(skipped)} tests were skipped")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
