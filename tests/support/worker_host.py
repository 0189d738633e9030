"""Agent of several processes for tests: started, killed, watched by process id."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

import rankdump
from rankdump._cli.daemon_client import fetch_agent_status
from rankdump._core.manifest import Manifest
from rankdump._core.status import StatusView
from rankdump._embedded_daemon import is_daemon_serving

WAIT_S = 300
BUFFER_BYTES = 16 << 20
"""Of a rank: small tensors need no more, and a busy host makes less in time."""


class RankPlace:
    """Address and folders that a rank needs of an agent, in any process."""

    def __init__(self, folder: Path, address: str = "") -> None:
        self.folder = folder
        self.address = address or f"unix:{folder}/agent.sock"
        self.tree = folder / "tree"

    def session(
        self, rank: int, *, job: str = "job", ranks: int = 8, saved: str = "tensor", **own: object
    ):
        """Open a session of a rank in this process."""
        config = self.folder / f"{job}-{rank}.json"
        common = {
            "dump_mode": 0,
            "saved_data": saved,
            "path": str(self.tree),
            "net_name": "Net",
            "iteration": "all",
            "input_output": 0,
            "kernels": [],
            "support_device": list(range(ranks)),
        }
        section = {"codec": "none", "block_timeout_s": 60, "buffer_bytes": BUFFER_BYTES} | own
        config.write_text(
            json.dumps(
                {
                    "common_dump_settings": common,
                    "e2e_dump_settings": {"enable": True, "trans_flag": True},
                    "rankdump": section,
                }
            )
        )
        session = rankdump.Session.from_environment(
            {
                "RANKDUMP_CONFIG": str(config),
                "RANKDUMP_AGENT": self.address,
                "RANKDUMP_JOB_ID": job,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
            }
        )
        assert session.active
        return session

    def arrays(self, rank: int) -> list[np.ndarray]:
        """Return every tensor of a rank that is in the tree, in the order of their values."""
        found = map(np.load, (self.tree / f"rank_{rank}" / "Net").rglob("*.npy"))
        return sorted(found, key=lambda array: tuple(array))

    def manifests(self, rank: int) -> list[Manifest]:
        folder = self.tree / f"rank_{rank}" / ".dump_metadata" / "manifest"
        return [Manifest.from_json(path.read_bytes()) for path in sorted(folder.iterdir())]


class WorkerHost(RankPlace):
    """`rankdumpd agent --workers N` in a folder, and ranks for it."""

    def __init__(
        self,
        folder: Path,
        workers: int,
        *,
        command: str = "agent",
        address: str = "",
        **settings: str,
    ) -> None:
        super().__init__(folder, address)
        self._command = command
        self._log = folder / "log"
        own = {"LISTEN": self.address, "STATE_DIR": f"{folder}/state"} | settings
        self._environ = {**os.environ, **{f"RANKDUMPD_AGENT__{k}": v for k, v in own.items()}}
        self.start(workers)

    def start(self, workers: int, **environ: str) -> None:
        """Start it, and return when it serves."""
        command = [sys.executable, "-m", "rankdumpd", self._command, "--workers", str(workers)]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self.folder, env=self._environ | environ
            )
        deadline = time.monotonic() + WAIT_S
        while not is_daemon_serving(self.address, timeout_s=0.2):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                raise AssertionError(self.log())
            time.sleep(0.05)

    def worker(self, index: int) -> int:
        """Return the process id of a worker."""
        return self.workers()[index]

    def workers(self) -> Mapping[int, int]:
        """Return the process ids of all workers that run."""
        found: dict[int, int] = {}
        children: list[int] = []
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            # A thread may end while its process is looked at.
            with contextlib.suppress(OSError):
                children += map(int, (task / "children").read_text().split())
        for child in children:
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
                if b"--as-worker" in words:
                    found[int(words[words.index(b"--as-worker") + 1])] = child
        return found

    def kill_all(self) -> None:
        """Kill the supervisor, and wait for its workers to end."""
        watches = watch(self.workers().values())
        self.process.kill()
        self.process.wait(WAIT_S)
        wait_gone(watches)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill_all()

    def log(self) -> str:
        return self._log.read_text()

    def view(self) -> StatusView:
        return fetch_agent_status(self.address)


def tensors(rank: int, first: int, count: int) -> list[np.ndarray]:
    """Return tensors that no other rank and no other turn has."""
    return [np.array([rank, n, 0.5], dtype=np.float32) for n in range(first, first + count)]


def dump(session: rankdump.Session, arrays: Iterable[np.ndarray]) -> None:
    """Dump each as the output of an operator of its own."""
    for array in arrays:
        session.dump("Add", f"Default/Add-op{int(array[1])}", "output", 0, array)


def watch(pids: Iterable[int]) -> list[int]:
    """Return descriptors by which the end of processes is notified."""
    return [os.pidfd_open(pid) for pid in pids]


def wait_gone(watches: Iterable[int]) -> None:
    """Return when all these processes are gone."""
    for descriptor in watches:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(WAIT_S * 1000), "a process is left behind"
        os.close(descriptor)
