"""A folder in memory with a daemon of its own, for as long as a measurement takes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

import rankdump

_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 60.0
_SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Host:
    """A running daemon and room for trees."""

    folder: Path
    agent: str

    def session(self, name: str, **common: object) -> rankdump.Session:
        """Open a session whose tree is the folder `name`; keywords change the plan's settings."""
        settings = {
            "dump_mode": 0,
            "path": str(self.tree(name)),
            "net_name": "Bench",
            "iteration": "all",
            "input_output": 0,
            "kernels": [],
            "support_device": [0],
        }
        config = self.folder / f"{name}.json"
        body = {"common_dump_settings": settings | common, "rankdump": {"block_timeout_s": 600}}
        config.write_text(json.dumps(body))
        environ = {
            "RANKDUMP_CONFIG": str(config),
            "RANKDUMP_AGENT": self.agent,
            "RANKDUMP_JOB_ID": name,
        }
        session = rankdump.Session.from_environment(environ)
        if not session.active:
            raise RuntimeError(f"the session of {config} is off")
        return session

    def tree(self, name: str) -> Path:
        """Return the folder of a session's tree."""
        return self.folder / f"tree-{name}"


@contextmanager
def memory_folder() -> Generator[Path, None, None]:
    """Lend a folder in memory; a disk would measure itself."""
    root = _SHM if _SHM.is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="rd-bench-", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def running_host() -> Generator[Host, None, None]:
    """Lend a daemon of its own process; it stops with the measurement."""
    with memory_folder() as folder:
        socket = folder / "agent.sock"
        command = [sys.executable, "-m", "rankdumpd", "standalone"]
        command += ["--socket", str(socket), "--state-dir", str(folder / "state")]
        log = folder / "daemon.log"
        with log.open("wb") as stderr, subprocess.Popen(command, stderr=stderr) as daemon:
            try:
                agent = f"unix://{socket}"
                _wait_for(agent, daemon, log)
                yield Host(folder, agent)
            finally:
                daemon.terminate()
                try:
                    daemon.wait(_STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    daemon.kill()


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
