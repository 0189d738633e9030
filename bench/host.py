"""A folder in memory with a daemon of its own, for as long as a measurement takes."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

import rankdump
from rankdump._cli.daemon_client import fetch_agent_status
from rankdump._core.status import StatusView

_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 60.0
_WRITE_TIMEOUT_S = 120.0
_POLL_S = 0.02
_SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Host:
    """A running daemon and a folder for trees."""

    folder: Path
    agent: str
    pid: int

    def environment(
        self,
        name: str,
        own: Mapping[str, object] | None = None,
        /,
        *,
        stat_calc_mode: str = "host",
        **common: object,
    ) -> dict[str, str]:
        """Write the plan of the job `name`, whose tree is its folder; return its variables.

        Other keywords change `common_dump_settings`, `own` changes the section `rankdump`.
        """
        settings = {
            "dump_mode": 0,
            "path": str(self.tree(name)),
            "net_name": "Bench",
            "iteration": "all",
            "input_output": 0,
            "kernels": [],
            "support_device": [0],
        }
        body = {
            "common_dump_settings": settings | common,
            "e2e_dump_settings": {
                "enable": True,
                "trans_flag": True,
                "stat_calc_mode": stat_calc_mode,
            },
            # Nothing may be lost, however slow the machine is today.
            "rankdump": {"block_timeout_s": 600, **(own or {})},
        }
        config = self.folder / f"{name}.json"
        config.write_text(json.dumps(body))
        return {
            "RANKDUMP_CONFIG": str(config),
            "RANKDUMP_AGENT": self.agent,
            "RANKDUMP_JOB_ID": name,
        }

    def session(
        self, name: str, own: Mapping[str, object] | None = None, /, **settings: Any
    ) -> rankdump.Session:
        """Open a session of the job `name` in this process; arguments as for `environment`."""
        session = rankdump.Session.from_environment(self.environment(name, own, **settings))
        if not session.active:
            raise RuntimeError(f"the session {name} is off")
        return session

    def status(self) -> StatusView:
        """Return the status of the agent."""
        return fetch_agent_status(self.agent)

    def wait_until_written(self, name: str, iteration: int) -> None:
        """Return when an iteration that the rank has ended is in the tree of job `name`."""
        deadline = time.monotonic() + _WRITE_TIMEOUT_S
        while time.monotonic() < deadline:
            for each in self.status().iterations:
                if (each.job_id, each.iteration) == (name, iteration) and each.complete:
                    return
            time.sleep(_POLL_S)
        raise RuntimeError(f"iteration {iteration} of {name} is not written")

    def wait_until_packed(self) -> None:
        """Return when no file that was stored unpacked waits."""
        deadline = time.monotonic() + _WRITE_TIMEOUT_S
        while self.status().backlog.waiting_files:
            if time.monotonic() > deadline:
                raise RuntimeError(f"not packed: {self.status().backlog}")
            time.sleep(_POLL_S)

    def wait_until_indexed(self) -> None:
        """Return when no rows of ended jobs wait for a table of statistics."""
        deadline = time.monotonic() + _WRITE_TIMEOUT_S
        for path in (self.folder / "state").rglob("ledger.sqlite"):
            with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as ledger:
                while waiting := ledger.execute("SELECT COUNT(*) FROM unindexed").fetchone()[0]:
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"{waiting} iterations are not in the table")
                    time.sleep(_POLL_S)

    def tree(self, name: str) -> Path:
        """Return the folder of a session's tree."""
        return self.folder / f"tree-{name}"

    def remove_tensors(self, name: str) -> None:
        """Delete the ranks' files of a tree; the coordinator may still be writing the others."""
        for folder in self.tree(name).glob("rank_*"):
            # The agent may be packing a file of it, and put that back meanwhile.
            while folder.exists():
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def memory_folder() -> Generator[Path, None, None]:
    """Yield a folder in memory, so that no disk is measured."""
    root = _SHM if _SHM.is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="rd-bench-", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def running_host(*, workers: int = 1, table: bool = True) -> Generator[Host, None, None]:
    """Yield a daemon of one or several processes; it stops with the measurement.

    Without `table`, its agent writes no table of statistics.
    """
    with memory_folder() as folder:
        socket = folder / "agent.sock"
        command = [sys.executable, "-m", "rankdumpd", "standalone"]
        command += ["--socket", str(socket), "--state-dir", str(folder / "state")]
        command += ["--workers", str(workers)]
        agent = f"unix://{socket}"
        own = {} if table else {"RANKDUMPD_AGENT__TABLE": "false"}
        with running_daemon(command, agent, folder / "daemon.log", own) as pid:
            yield Host(folder, agent, pid)


@contextmanager
def running_daemon(
    command: list[str], address: str, log: Path, own: Mapping[str, str] | None = None
) -> Generator[int, None, None]:
    """Yield a process that serves an address; RuntimeError with its log when it does not.

    `own` are variables of its environment.
    """
    # How full the disk of this machine is should change nothing.
    kept = ("RANKDUMPD_AGENT__KEEP_FREE_RATIO", "RANKDUMPD_AGENT__KEEP_FREE_INODES_RATIO")
    environ = os.environ | dict.fromkeys(kept, "0") | dict(own or {})
    with (
        log.open("wb") as stderr,
        subprocess.Popen(command, stderr=stderr, env=environ) as daemon,
    ):
        try:
            _wait_for(address, daemon, log)
            yield daemon.pid
        finally:
            daemon.terminate()
            try:
                daemon.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                daemon.kill()


@contextmanager
def running_coordinator(
    folder: Path, *, tables: bool = False
) -> Generator[tuple[str, int], None, None]:
    """Yield address and process id of a coordinator that keeps its state in a folder.

    With `tables` it writes the orders as Parquet tables as well.
    """
    address, log = f"unix:{folder}/coordinator.sock", folder / "coordinator.log"
    config = folder / "rankdumpd.toml"
    config.write_text(
        f'[coordinator]\nlisten = "{address}"\nstate_dir = "{folder}/state"\ntrace_events = 0\n'
        f"table_events = {1 << 40 if tables else 0}\n"
    )
    command = [sys.executable, "-m", "rankdumpd", "coordinator", "--config", str(config)]
    with running_daemon(command, address, log) as pid:
        yield address, pid


def _wait_for(agent: str, daemon: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    with grpc.insecure_channel(agent) as channel:
        ready = grpc.channel_ready_future(channel)
        while daemon.poll() is None and time.monotonic() < deadline:
            try:
                ready.result(0.2)
                return
            except grpc.FutureTimeoutError:
                continue
    raise RuntimeError(f"no daemon at {agent}:\n{log.read_text()}")
