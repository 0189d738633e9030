"""The daemon that a script brings along: shared by the ranks of a host, gone with the last."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rankdump.contract.errors import UnavailableError
from rankdump.embedded import Lease, serving
from rankdump.embedded.sharing import _leashed

RANK = """
import sys
from rankdump.embedded import Lease
lease = Lease("job")
print(lease.address, flush=True)
sys.stdin.read()
lease.close()
print("left", flush=True)
"""


class Rank:
    """A process that has a share until its standard input ends."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK],
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


def test_ranks_share_one_daemon_until_the_last_is_gone(socket_folder: Path):
    ranks = [Rank(socket_folder) for _ in range(2)]
    addresses = {rank.address() for rank in ranks}
    assert len(addresses) == 1
    address = addresses.pop()
    ranks[0].leave()
    assert serving(address)
    ranks[1].leave()
    assert list(socket_folder.iterdir()) == []


def test_killed_ranks_leave_nothing_that_stays(socket_folder: Path):
    """The daemon drains and ends by itself; the next one clears its folder away."""
    rank = Rank(socket_folder)
    address = rank.address()
    folder = Path(address.removeprefix("unix:")).parent
    rank.process.send_signal(signal.SIGKILL)
    rank.process.communicate(timeout=60)
    log = folder / "rankdumpd.log"
    while _leashed(folder):
        assert log.exists()
    assert log.read_text().rstrip().endswith("stopped")
    lease = Lease("another", socket_folder)
    assert not folder.exists()
    lease.close()
    assert list(socket_folder.iterdir()) == []


def test_a_fork_has_no_share(socket_folder: Path):
    """A worker that outlives its rank does not keep the daemon."""
    lease = Lease("job", socket_folder)
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


def test_one_that_cannot_start_says_why(socket_folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANKDUMPD_AGENT__QUEUE_BYTES", "many")
    with pytest.raises(UnavailableError, match=r"ended before it served.*QUEUE_BYTES"):
        Lease("job", socket_folder)
    assert list(socket_folder.iterdir()) == []


def test_a_folder_of_somebody_else_is_not_used(socket_folder: Path):
    """Others may write to /dev/shm, but not choose where a rank's tensors go."""
    link = socket_folder / f"rankdump-of-{os.getuid()}-job"
    elsewhere = socket_folder / "elsewhere"
    elsewhere.mkdir()
    link.symlink_to(elsewhere)
    with pytest.raises(UnavailableError, match="somebody else's"):
        Lease("job", socket_folder)
    link.unlink()
    link.mkdir(mode=0o777)
    link.chmod(0o777)
    with pytest.raises(UnavailableError, match="somebody else's"):
        Lease("job", socket_folder)
    assert list(elsewhere.iterdir()) == []
