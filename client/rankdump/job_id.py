"""Name of the job that a process belongs to: the same on all ranks, another one for every job.

`job_id_of` is pure; `launcher_of` looks into /proc.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rankdump.contract.addresses import is_loopback

JOB_VARIABLE = "RANKDUMP_JOB_ID"
"""Names the job, whatever its launcher calls it."""
_ELASTIC = "TORCHELASTIC_RUN_ID"
_NO_ELASTIC_RUN = "none"
"""What torchrun says where nobody gave it `--rdzv-id`."""
# Processes on this host and in the whole job, as far as a launcher says both.
_LOCAL_SIZE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
# torch's names, then MindSpore's (msrun).
_MASTER = (("MASTER_ADDR", "MASTER_PORT"), ("MS_SCHED_HOST", "MS_SCHED_PORT"))
_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES")
# Step numbers from here on are Slurm's own, such as that of a batch script (slurm.h).
_SLURM_FIRST_OWN_STEP = 0xFFFFFFF0
_LAUNCHED = ("RANK", "RANK_ID", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
_LONGEST_HOST = 32
_MAX_ANCESTORS = 64


@dataclass(frozen=True, slots=True)
class Launcher:
    """The process that started all ranks of a job on this host."""

    pid: int
    started: int
    """Clock ticks from the boot of the host to its start (proc(5), `starttime`)."""
    boot: str = ""
    """Id of that boot."""
    parent: int = 0


def job_id_of(
    environ: Mapping[str, str], *, world_size: int, tree: str, launcher: Launcher, host: str
) -> str:
    """Return the id that every rank of a job derives, and no other job with another tree.

    In this order: RANKDUMP_JOB_ID; the job and step of Slurm; the namespace of PMIx; the run id of
    torchrun; what the ranks share: their launcher, or master address and port where they run on
    several hosts. `host` is this host's name.
    """
    named = environ.get(JOB_VARIABLE) or _slurm_job(environ) or environ.get("PMIX_NAMESPACE")
    named = named or _elastic_run(environ)
    if named:
        return named
    master = _master(environ)
    if spans_hosts(environ, world_size=world_size) and master:
        return f"{master.replace(':', '-')}-{_digest(tree)}"
    name = host.partition(".")[0][:_LONGEST_HOST] or "host"
    return f"{name}-{launcher.pid}-{_digest(launcher.boot, str(launcher.started), tree)}"


def spans_hosts(environ: Mapping[str, str], *, world_size: int) -> bool:
    """Return whether a job has ranks on other hosts, or may have: its launcher does not say."""
    if world_size <= 1:
        return False
    local = _first(environ, _LOCAL_SIZE)
    if local.isdecimal():
        return int(local) < world_size
    nodes = _first(environ, _NODES)
    if nodes.isdecimal():
        return int(nodes) > 1
    master = _master(environ)
    return bool(master) and not is_loopback(master)


def launcher_of(environ: Mapping[str, str], *, world_size: int) -> Launcher:
    """Return who started all ranks of this host; a process that is alone started itself.

    It is the nearest ancestor that is no rank: a wrapper between launcher and rank, such as a shell
    or numactl, has the rank's variables. Ranks without any, as spawned ones, are their parent's.
    """
    if world_size <= 1 and not environ.get(_ELASTIC):
        return _process(os.getpid())
    variable = next((name for name in _LAUNCHED if environ.get(name)), "")
    found = _process(os.getppid())
    for _ in range(_MAX_ANCESTORS if variable else 0):
        if found.parent < 1 or not _has_variable(found.pid, variable):
            break
        found = _process(found.parent)
    return found


def _slurm_job(environ: Mapping[str, str]) -> str:
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")
    if not job:
        return ""
    if step.isdecimal() and int(step) < _SLURM_FIRST_OWN_STEP:
        return f"{job}.{step}"
    # Runs that one batch script starts side by side.
    run = _elastic_run(environ)
    return f"{job}-{run}" if run else job


def _elastic_run(environ: Mapping[str, str]) -> str:
    run = environ.get(_ELASTIC, "")
    return "" if run == _NO_ELASTIC_RUN else run


def _master(environ: Mapping[str, str]) -> str:
    for address, port in _MASTER:
        if environ.get(address):
            return f"{environ[address]}:{environ.get(port, '')}"
    return ""


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((environ[name] for name in names if environ.get(name)), "")


def _digest(*parts: str) -> str:
    joined = "\0".join(parts).encode("utf-8", "surrogateescape")
    return hashlib.blake2b(joined, digest_size=4).hexdigest()


def _process(pid: int) -> Launcher:
    """Return what /proc says of a process; one that cannot be seen has only its number."""
    try:
        # The name in parentheses may hold anything (proc(5)).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return Launcher(pid, int(fields[19]), boot, parent=int(fields[1]))
    except (OSError, ValueError, IndexError):
        return Launcher(pid, 0)


def _has_variable(pid: int, name: str) -> bool:
    """Return whether a process was started with a variable; False where that cannot be read."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return any(each.startswith(f"{name}=".encode()) for each in environ.split(b"\0"))
