"""Embedded daemon: shared by the ranks of a host, ends with the last one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rankdump._core.daemon_endpoint import DaemonFolder
from rankdump._embedded_daemon import DaemonLease, is_daemon_serving
from rankdump.errors import UnavailableError

RANK = """
import sys
from rankdump._embedded_daemon import DaemonLease
lease = DaemonLease("job")
lease.wait_until_serving()
print(lease.address, flush=True)
sys.stdin.read()
lease.close()
print("left", flush=True)
"""
HASTY_RANK = RANK.replace("lease.wait_until_serving()\n", "")
PREPARING_RANK = """
import os
from rankdump._session.agent_finder import default_agent_finder
default_agent_finder.prepare(os.environ)
"""


def wait_for(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


def daemon_in(folder: Path) -> int:
    """Return the process of the daemon that has its files in a folder."""
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if link.readlink() == folder:
                return int(link.parent.name)
    raise AssertionError(f"no daemon in {folder}")


def daemon_of_a_user(folder: Path) -> bool:
    """Return whether a process holds a lease of the daemon of a folder."""
    users = os.open(folder / "users", os.O_RDWR)
    try:
        return not DaemonFolder(folder).is_only_user(users)
    finally:
        os.close(users)


class RankProcess:
    """A process that uses the daemon until its standard input ends."""

    def __init__(self, folder: Path, code: str = RANK) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(folder)},
        )

    def address(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def leave(self) -> None:
        out, _ = self.process.communicate(timeout=60)
        assert (out, self.process.returncode) == ("left\n", 0)


def test_ranks_share_one_daemon_until_the_last_exits(socket_folder: Path):
    ranks = [RankProcess(socket_folder) for _ in range(2)]
    addresses = {rank.address() for rank in ranks}
    assert len(addresses) == 1
    address = addresses.pop()
    ranks[0].leave()
    assert is_daemon_serving(address)
    ranks[1].leave()
    assert list(socket_folder.iterdir()) == []


@pytest.mark.parametrize("code", [RANK, HASTY_RANK], ids=["serving", "starting"])
def test_killed_ranks_leave_no_daemon_and_no_folder(socket_folder: Path, code: str):
    """The daemon drains, ends, and removes its folder by itself."""
    rank = RankProcess(socket_folder, code)
    folder = Path(rank.address().removeprefix("unix:")).parent
    rank.process.send_signal(signal.SIGKILL)
    rank.process.communicate(timeout=60)
    wait_for(lambda: not folder.exists())
    assert list(socket_folder.iterdir()) == []


def test_rank_that_ends_while_its_daemon_starts_leaves_nothing(socket_folder: Path):
    rank = RankProcess(socket_folder, HASTY_RANK)
    rank.address()
    rank.leave()
    assert list(socket_folder.iterdir()) == []


def test_daemon_that_was_prepared_and_not_used_leaves_nothing(socket_folder: Path):
    """A script may call `api_dump_init`, and never `api_dump_start`."""
    environ = {key: value for key, value in os.environ.items() if key != "RANKDUMP_AGENT"}
    ended = subprocess.run(
        [sys.executable, "-c", PREPARING_RANK],
        capture_output=True,
        env=environ | {"TMPDIR": str(socket_folder)},
        timeout=120,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
    assert list(socket_folder.iterdir()) == []


def test_leftovers_of_a_killed_daemon_are_removed_by_the_next(socket_folder: Path):
    rank = RankProcess(socket_folder)
    folder = DaemonFolder(Path(rank.address().removeprefix("unix:")).parent)
    daemon = daemon_in(folder.path)
    # The daemon first: it would clear its folder away.
    os.kill(daemon, signal.SIGKILL)
    rank.process.send_signal(signal.SIGKILL)
    rank.process.communicate(timeout=60)
    wait_for(lambda: not folder.has_daemon)
    assert folder.path.exists()
    lease = DaemonLease("another", root=socket_folder)
    assert not folder.path.exists()
    lease.close()
    assert list(socket_folder.iterdir()) == []


def test_ranks_that_come_while_the_daemon_ends_get_a_new_one(socket_folder: Path):
    """A launcher restarts killed ranks at once, under the same job id."""
    rank = RankProcess(socket_folder)
    folder = Path(rank.address().removeprefix("unix:")).parent
    daemon = daemon_in(folder)
    os.kill(daemon, signal.SIGSTOP)
    rank.process.send_signal(signal.SIGKILL)
    rank.process.communicate(timeout=60)
    again = RankProcess(socket_folder)
    wait_for(lambda: daemon_of_a_user(folder))
    os.kill(daemon, signal.SIGKILL)
    address = again.address()
    assert Path(address.removeprefix("unix:")).parent == folder
    assert is_daemon_serving(address)
    assert daemon_in(folder) != daemon
    again.leave()
    assert list(socket_folder.iterdir()) == []


def test_forked_worker_does_not_keep_the_daemon(socket_folder: Path):
    """A worker that outlives its rank does not keep the daemon."""
    lease = DaemonLease("job", root=socket_folder)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    lease.close()
    assert list(socket_folder.iterdir()) == []
    os.close(writer)
    os.waitpid(child, 0)


def test_failed_start_reports_its_cause(socket_folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANKDUMPD_AGENT__QUEUE_BYTES", "many")
    lease = DaemonLease("job", root=socket_folder)
    with pytest.raises(UnavailableError, match=r"ended before it was ready.*QUEUE_BYTES"):
        lease.wait_until_serving()
    assert "QUEUE_BYTES" in lease.close()
    (kept,) = socket_folder.glob("*/*")
    assert "QUEUE_BYTES" in kept.read_text()


def test_folder_of_another_user_is_not_used(socket_folder: Path):
    """Other users may write to /dev/shm, but must not choose where the tensors of a rank
    are sent.
    """
    link = socket_folder / f"rankdump-of-{os.getuid()}-job"
    elsewhere = socket_folder / "elsewhere"
    elsewhere.mkdir()
    link.symlink_to(elsewhere)
    with pytest.raises(UnavailableError, match="belongs to another user"):
        DaemonLease("job", root=socket_folder)
    link.unlink()
    link.mkdir(mode=0o777)
    link.chmod(0o777)
    with pytest.raises(UnavailableError, match="belongs to another user"):
        DaemonLease("job", root=socket_folder)
    assert list(elsewhere.iterdir()) == []
