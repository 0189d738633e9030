"""The settings of each process, with their defaults; a value that cannot be is refused. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rankdump.contract.errors import ConfigError

_MIB = 1 << 20
_GIB = 1 << 30


def _required(key: str, value: str) -> None:
    if not value:
        raise ConfigError("settings", key, value, "unix:/path or host:port")


def _absolute(key: str, folder: str) -> None:
    if not Path(folder).is_absolute():
        raise ConfigError("settings", key, folder, "an absolute folder")


def _folders(key: str, joined: str) -> None:
    for folder in joined.split(":") if joined else ():
        _absolute(key, folder)


def _between(key: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError("settings", key, value, f"{low} to {high}")


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """The agent of one host."""

    listen: str = "unix:/run/rankdump/agent.sock"
    """Where ranks and people reach it: `unix:/path`, or `host:port`: other hosts need [tls]."""
    coordinator: str = ""
    """Where the coordinator of the job listens; empty when there is none."""
    state_dir: str = "/var/lib/rankdump"
    """Folder of the ledger; absolute."""
    workers: int = 1
    """Processes that ranks are shared out to; what follows in bytes and threads is for all."""
    encode_threads: int = 0
    """Threads that compress and write; 0 means one for each core this process may use."""
    nice: int = 10
    """How far other processes go first, 0 to 19: ranks have the cores when they want them."""
    queue_bytes: int = 512 * _MIB
    """Tensor bytes taken in but not yet written and committed."""
    slab_bytes: int = 256 * _MIB
    """Largest shared memory of one rank; 0 means none, and its frames travel on the stream."""
    memory_bytes: int = 0
    """What queue, slabs and sessions stay under together; 0 means half of the memory there is."""
    runtime_dir: str = ""
    """Folder of the shared memory, absolute and on tmpfs; empty means beside the socket."""
    runtime_group: str = ""
    """Group that may map it; empty means the group of this process."""
    max_record_bytes: int = 16 * _GIB
    """Largest tensor that is taken."""
    report_bytes: int = 1 * _GIB
    """What is kept on disk until the coordinator has it; beyond it the oldest events are lost."""
    roots: str = ""
    """Folders, absolute and joined by `:`, in which dumps may be; empty means anywhere."""
    max_sessions: int = 4096
    """Ranks that may be here at once, with those that opened a session and never came."""
    keep_free_bytes: int = 64 * _MIB
    """Tensors are refused rather than leave less than this on their disk."""
    keep_free_ratio: float = 0.1
    """The same as a share of the disk; the larger of both holds."""
    keep_free_inodes_ratio: float = 0.01
    """The same for the files that a disk can hold."""
    disk_bytes: int = 0
    """Most that dumps of this agent may take together; 0 means no limit."""
    job_bytes: int = 0
    """Most that the dump of one job may take here; 0 means no limit."""
    retain_days: float = 0.0
    """Iterations are removed when they are older than that; 0 means never."""
    retain_bytes: int = 0
    """The same, oldest first, while dumps take more than that together; 0 means never."""
    ingest_dir: str = ""
    """Folder, absolute, where MindSpore or CANN writes dumps that are taken over; empty: none."""
    ingest_into: str = ""
    """The tree they are taken into, absolute and not in that folder."""
    ingest_delete: bool = False
    """Remove each tensor from that folder once its copy is committed."""
    drain_timeout_s: float = 30.0
    """Longest time a stopping agent gives ranks and its own queue; ranks get half of it."""

    def __post_init__(self) -> None:
        _required("agent.listen", self.listen)
        _absolute("agent.state_dir", self.state_dir)
        _between("agent.workers", self.workers, 1, 256)
        _between("agent.encode_threads", self.encode_threads, 0, 1024)
        _between("agent.nice", self.nice, 0, 19)
        _between("agent.queue_bytes", self.queue_bytes, self.workers * _MIB, 1 << 50)
        _between("agent.slab_bytes", self.slab_bytes, 0, 1 << 50)
        if self.memory_bytes:
            _between("agent.memory_bytes", self.memory_bytes, self.queue_bytes, 1 << 50)
        if self.runtime_dir:
            _absolute("agent.runtime_dir", self.runtime_dir)
        _between("agent.max_record_bytes", self.max_record_bytes, 1, 1 << 50)
        _between("agent.report_bytes", self.report_bytes, self.workers * _MIB, 1 << 50)
        _folders("agent.roots", self.roots)
        _between("agent.max_sessions", self.max_sessions, 1, 1 << 20)
        _between("agent.keep_free_bytes", self.keep_free_bytes, 0, 1 << 60)
        _between("agent.keep_free_ratio", self.keep_free_ratio, 0, 0.99)
        _between("agent.keep_free_inodes_ratio", self.keep_free_inodes_ratio, 0, 0.99)
        _between("agent.disk_bytes", self.disk_bytes, 0, 1 << 60)
        _between("agent.job_bytes", self.job_bytes, 0, 1 << 60)
        _between("agent.retain_days", self.retain_days, 0, 36_500)
        _between("agent.retain_bytes", self.retain_bytes, 0, 1 << 60)
        if self.ingest_dir or self.ingest_into or self.ingest_delete:
            _absolute("agent.ingest_dir", self.ingest_dir)
            _absolute("agent.ingest_into", self.ingest_into)
        _between("agent.drain_timeout_s", self.drain_timeout_s, 0, 86_400)


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """The coordinator of a job."""

    listen: str = "127.0.0.1:7421"
    """Where agents and people reach it: `unix:/path`, or `host:port`: other hosts need [tls]."""
    state_dir: str = "/var/lib/rankdump"
    """Folder of what survives it; absolute, and it may be the agent's."""
    roots: str = ""
    """Folders, absolute and joined by `:`, in which dumps may be; empty means anywhere."""
    deadline_s: float = 300.0
    """An iteration of which nothing came for so long is merged without the ranks that miss."""
    table_events: int = 1_000_000_000
    """Iterations with more events get no Parquet table; none do without pyarrow."""
    trace_events: int = 1_000_000
    """Iterations with more events get no trace: no viewer opens one of that size."""
    keep_days: float = 30.0
    """What is known of a finished job is forgotten then; its tree stays."""
    keep_bytes: int = _GIB
    """The same, oldest first, when what is known of all jobs takes more."""

    def __post_init__(self) -> None:
        _required("coordinator.listen", self.listen)
        _absolute("coordinator.state_dir", self.state_dir)
        _folders("coordinator.roots", self.roots)
        _between("coordinator.deadline_s", self.deadline_s, 0, 86_400)
        _between("coordinator.table_events", self.table_events, 0, 1 << 40)
        _between("coordinator.trace_events", self.trace_events, 0, 1 << 40)
        _between("coordinator.keep_days", self.keep_days, 0, 36_500)
        _between("coordinator.keep_bytes", self.keep_bytes, _MIB, 1 << 50)
