"""Processes of a run: agents, their coordinator, ranks; all are restarted when they end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from faults.connection_proxy import ConnectionProxy
from faults.control_page import ControlPage
from faults.message_tamperer import MessageTamperer
from faults.rank import RankConfiguration
from faults.shrinkable_disk import ShrinkableDisk

SOURCES = Path(__file__).parents[2]
MIB = 1 << 20
GRACE_S = 1.5
"""Least age of a process that is killed."""
RING_STEPS = 8
"""Steps of each rank in its black box."""
_PATH = [str(SOURCES / each) for each in ("tests/faults/site", "tests", "client", "daemon")]


class ManagedProcess:
    """One process that faults may end, and that is started again."""

    def __init__(self, name: str, folder: Path, *, prefix: str) -> None:
        """`prefix` is its disk, below which the layer lets calls fail."""
        self.name, self.folder = name, folder
        self.control_path = folder / f"{name}.control"
        self.control = ControlPage(self.control_path)
        self.log = folder / f"{name}.log"
        self.environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(_PATH),
            "FAULTS_CONTROL": str(self.control_path),
            "FAULTS_PREFIX": prefix,
            "OMP_NUM_THREADS": "1",
        }
        self.popen: subprocess.Popen[bytes] | None = None
        self.started_s = 0.0
        self.starts = 0
        self.wanted = False
        """Whether it is to be started again when it ends."""
        self.killed = False
        """Whether the rig ended it."""
        self.was_up = False
        """Whether the present process was ever seen up."""

    def command(self) -> list[str]:
        """Return its command line."""
        raise NotImplementedError

    def start(self) -> None:
        """Run it."""
        self.wanted, self.killed, self.was_up = True, False, False
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                self.command(), stdout=log, stderr=log, env=self.environ, cwd=self.folder
            )
        self.started_s = time.monotonic()
        self.starts += 1

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.popen is not None and self.popen.poll() is None

    @property
    def up(self) -> bool:
        """Whether its present process serves or trains."""
        raise NotImplementedError

    @property
    def settled(self) -> bool:
        """Whether it has run long enough to be hit by something."""
        return self.alive and time.monotonic() - self.started_s > GRACE_S and self.up

    @property
    def pid(self) -> int:
        """Process id of the present process."""
        assert self.popen is not None
        return self.popen.pid

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal."""
        if number == signal.SIGKILL:
            self.killed = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def end(self, timeout_s: float) -> int | None:
        """Return its exit status; None where it had to be killed."""
        self.wanted = False
        if self.popen is None:
            return 0
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            self.popen.wait()
            return None


class DaemonProcess(ManagedProcess):
    """A daemon, which is up while its socket is listened on."""

    address = ""

    @property
    def up(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return not probe.connect_ex(self.address.removeprefix("unix:"))


class CoordinatorProcess(DaemonProcess):
    """`rankdumpd coordinator`."""

    def __init__(self, folder: Path, state: Path, trees: Path, address: str) -> None:
        super().__init__("coordinator", folder, prefix=str(state))
        self.address, self.state = address, state
        self.environ |= {
            "RANKDUMPD_COORDINATOR__LISTEN": address,
            "RANKDUMPD_COORDINATOR__STATE_DIR": f"{state}/state",
            # Longer than any fault lasts. A rank that is started anew counts from 0, the others do
            # not: no iteration would be complete, and the coordinator would hold them all.
            "RANKDUMPD_COORDINATOR__DEADLINE_S": "20",
        }
        self.disk = ShrinkableDisk(state, size_bytes=64 * MIB, inodes=1 << 12)
        self.disks = [self.disk]

    def command(self) -> list[str]:
        return [sys.executable, "-m", "rankdumpd", "coordinator"]


class AgentProcess(DaemonProcess):
    """`rankdumpd agent`, with its tree, its state and its socket on disks of their own."""

    def __init__(self, name: str, folder: Path, *, coordinator: str, workers: int) -> None:
        disks = folder / name
        self.tree, self.state, self.run = disks / "tree", disks / "state", disks / "run"
        super().__init__(name, folder, prefix=str(self.tree))
        self.workers, self.job_id = workers, f"soak-{name}"
        self.address = f"unix:{self.run}/agent.sock"
        settings = {
            "LISTEN": self.address,
            "COORDINATOR": coordinator,
            "STATE_DIR": f"{self.state}/state",
            "WORKERS": str(workers),
            "ENCODE_THREADS": "2",
            "SLAB_BYTES": str(4 * MIB * workers),
            "QUEUE_BYTES": str(64 * MIB),
            "MEMORY_BYTES": str(1024 * MIB),
            "KEEP_FREE_BYTES": "0",
            "RUNTIME_DIR": str(self.run),
            "DRAIN_TIMEOUT_S": "10",
            "TABLE": "true",
        }
        self.environ |= {f"RANKDUMPD_AGENT__{key}": value for key, value in settings.items()}
        self.tree_disk = ShrinkableDisk(self.tree, size_bytes=4096 * MIB, inodes=1 << 20)
        self.state_disk = ShrinkableDisk(self.state, size_bytes=1024 * MIB, inodes=1 << 12)
        run = ShrinkableDisk(self.run, size_bytes=256 * MIB, inodes=1 << 12)
        self.disks = [self.tree_disk, self.state_disk, run]

    def command(self) -> list[str]:
        return [sys.executable, "-m", "rankdumpd", "agent"]

    @property
    def sockets(self) -> list[str]:
        """Names of the sockets that a rank may come to."""
        many = range(self.workers if self.workers > 1 else 0)
        return ["agent.sock", *(f"agent.sock.{index}" for index in many)]

    def worker_pids(self) -> list[int]:
        """Return the processes that write: its workers, or itself."""
        if self.workers < 2:
            return [self.pid]
        found: list[int] = []
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{self.pid}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        return found


@dataclass(frozen=True, slots=True)
class RankRole:
    """How a rank dumps."""

    rank: int
    agent: int
    meddled: bool = False
    own: dict[str, object] = field(default_factory=dict[str, object])
    common: dict[str, object] = field(default_factory=dict[str, object])


class RankProcess(ManagedProcess):
    """A training process, with the proxy and tamperer between it and its agent."""

    def __init__(
        self, role: RankRole, folder: Path, agent: AgentProcess, *, world: int, pause_s: float
    ):
        super().__init__(f"rank{role.rank}", folder, prefix="/nothing")
        self.role, self.agent = role, agent
        self._pause_s = pause_s
        near = folder / f"p{role.rank}"
        self.proxy = ConnectionProxy(near, agent.run, agent.sockets)
        address = f"unix:{near}/agent.sock"
        self.tamperer: MessageTamperer | None = None
        if role.meddled:
            (folder / f"m{role.rank}").mkdir()
            asked = f"unix:{folder}/m{role.rank}/agent.sock"
            self.tamperer = MessageTamperer(asked, address)
            address = asked
        config = folder / f"rank{role.rank}.json"
        config.write_text(json.dumps(self._configuration(world)))
        self.environ |= {
            "RANKDUMP_CONFIG": str(config),
            "RANKDUMP_AGENT": address,
            "RANKDUMP_JOB_ID": agent.job_id,
            "RANK": str(role.rank),
            "LOCAL_RANK": str(role.rank),
            "WORLD_SIZE": str(world),
        }

    def _configuration(self, world: int) -> dict[str, object]:
        common = {
            "dump_mode": 0,
            "path": f"{self.agent.tree}/dump",
            "net_name": "Net",
            "iteration": "all",
            "input_output": 0,
            "kernels": [],
            "support_device": list(range(world)),
        }
        return {
            "common_dump_settings": common | self.role.common,
            "e2e_dump_settings": {"enable": True, "trans_flag": True},
            "rankdump": {
                "block_timeout_s": 15,
                "shared_memory": not self.role.meddled,
                "blackbox": {"steps": RING_STEPS, "post_steps": 1, "pause_s": 5},
            }
            | self.role.own,
        }

    def command(self) -> list[str]:
        part = RankConfiguration(
            rank=self.role.rank,
            life=self.starts,
            journal=str(self.folder / f"rank{self.role.rank}.{self.starts}.journal"),
            control=str(self.control_path),
            root=f"{self.agent.tree}/dump",
            pause_s=self._pause_s,
        )
        return [sys.executable, "-m", "faults.rank", json.dumps(asdict(part))]

    @property
    def up(self) -> bool:
        """Whether anything of its present life is safe."""
        return any(self.acknowledged)

    @property
    def acknowledged(self) -> bytes:
        """How much of its present life is safe, as its journal has it; empty at its start."""
        path = self.folder / f"rank{self.role.rank}.{self.starts - 1}.acknowledged"
        return path.read_bytes() if path.exists() else b""

    def close(self) -> None:
        """Close proxies and tamperers."""
        if self.tamperer is not None:
            self.tamperer.close()
        self.proxy.close()


@dataclass(slots=True)
class FaultDeployment:
    """All processes of a run."""

    coordinator: CoordinatorProcess
    agents: list[AgentProcess]
    ranks: list[RankProcess]
    reports: list[ConnectionProxy]
    """Between each agent and the coordinator."""

    @property
    def processes(self) -> list[ManagedProcess]:
        """Those that are to live."""
        return [self.coordinator, *self.agents, *self.ranks]

    @property
    def proxies(self) -> list[ConnectionProxy]:
        """All that can be cut."""
        return [*(rank.proxy for rank in self.ranks), *self.reports]

    def close(self) -> None:
        """End whatever runs still."""
        for process in self.processes:
            process.wanted = False
            if process.alive:
                process.kill(signal.SIGCONT)
                for pid in process.worker_pids() if isinstance(process, AgentProcess) else []:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                process.kill()
                process.end(10)
        for rank in self.ranks:
            rank.close()
        for proxy in self.reports:
            proxy.close()


STREAM = {"shared_memory": False}
SMALL = (
    RankRole(0, 0),
    RankRole(1, 0, meddled=True),
    RankRole(2, 0, common={"saved_data": "statistic"}),
)
LARGE = (
    RankRole(0, 0),
    RankRole(1, 0, meddled=True),
    RankRole(2, 0, meddled=True),
    RankRole(3, 0, common={"saved_data": "statistic"}),
    RankRole(4, 1),
    RankRole(5, 1, own={"durability": "synced"}),
    RankRole(6, 1, own={"layout": "cann", "codec": "none"}),
    RankRole(7, 1, own={"codec": "none"}),
)


def make_deployment(folder: Path, *, small: bool, pause_s: float) -> FaultDeployment:
    """Return the deployment, not yet started; its disks are below the folder."""
    meeting = folder / "c"
    meeting.mkdir(exist_ok=True)
    coordinator = CoordinatorProcess(
        folder, folder / "coordinator", folder, f"unix:{meeting}/coordinator.sock"
    )
    agents: list[AgentProcess] = []
    reports: list[ConnectionProxy] = []
    for name, workers in (("a", 1), ("b", 2))[: 1 if small else 2]:
        near = folder / f"c{name}"
        reports.append(ConnectionProxy(near, meeting, ["coordinator.sock"]))
        address = f"unix:{near}/coordinator.sock"
        agents.append(AgentProcess(name, folder, coordinator=address, workers=workers))
    roles = SMALL if small else LARGE
    ranks = [
        RankProcess(role, folder, agents[role.agent], world=len(roles), pause_s=pause_s)
        for role in roles
    ]
    return FaultDeployment(coordinator, agents, ranks, reports)
