"""Identity of a rank: its place in the job according to the launcher's variables, the id of the
job, and the request that opens its session. The job id is the same on all ranks of a job, and
different for every job.

This module reads the environment and /proc, never the network. `derive_job_id` is pure.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankdump._core.daemon_endpoint import is_loopback
from rankdump._core.session_protocol import SessionRequest
from rankdump._core.timeouts import TIMEOUT_VARIABLES
from rankdump.errors import ConfigError

JOB_VARIABLE = "RANKDUMP_JOB_ID"
"""Variable with the id of the job; it overrides the id that follows from the launcher."""
_ELASTIC_VARIABLE = "TORCHELASTIC_RUN_ID"
_RESTART_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
_NO_ELASTIC_RUN = "none"
"""Run id that torchrun uses if `--rdzv-id` is not given."""
# Variables with the number of the job's processes on this host.
_LOCAL_SIZE_VARIABLES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
# Variables with the master's address and port: torch's, then MindSpore's (msrun).
_MASTER_VARIABLES = (("MASTER_ADDR", "MASTER_PORT"), ("MS_SCHED_HOST", "MS_SCHED_PORT"))
_NODE_COUNT_VARIABLES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES")
# From this step number on, steps are Slurm's own, such as that of a batch script (slurm.h).
_MIN_SLURM_OWN_STEP = 0xFFFFFFF0
# Lightning sets both variables for the ranks that the first rank of a host starts, but no number of
# the rank.
_LOCAL_RANK_VARIABLE = "LOCAL_RANK"
_NODE_RANK_VARIABLE = "NODE_RANK"
_MAX_HOST_CHARACTERS = 32
_MAX_ANCESTORS = 64


@dataclass(frozen=True, slots=True)
class JobLauncher:
    """The process that started all ranks of a job on this host."""

    pid: int
    started: int
    """Clock ticks from the boot of the host to the start of the process (proc(5), `starttime`)."""
    boot: str = ""
    """Id of the boot of the host."""
    parent: int = 0


def derive_job_id(
    environ: Mapping[str, str], *, world_size: int, tree: str, launcher: JobLauncher, host: str
) -> str:
    """Return the job id: the same on every rank of a job, and different for other jobs and other
    trees.

    It comes from the first of these that is known: RANKDUMP_JOB_ID; the job and step of Slurm; the
    namespace of PMIx; the run id of torchrun; the launcher that the ranks share, or the master's
    address and port for ranks on several hosts. `host` is the name of this host.
    """
    named = environ.get(JOB_VARIABLE) or _find_slurm_job(environ) or environ.get("PMIX_NAMESPACE")
    named = named or _find_elastic_run(environ)
    if named:
        return named
    master = _find_master_address(environ)
    if is_multi_host(environ, world_size=world_size) and master:
        return f"{master.replace(':', '-')}-{_compute_digest(tree)}"
    name = host.partition(".")[0][:_MAX_HOST_CHARACTERS] or "host"
    return f"{name}-{launcher.pid}-{_compute_digest(launcher.boot, str(launcher.started), tree)}"


def is_multi_host(environ: Mapping[str, str], *, world_size: int) -> bool:
    """Return whether a job has ranks on other hosts, or may have because its launcher
    does not say.
    """
    if world_size <= 1:
        return False
    local = _read_first(environ, _LOCAL_SIZE_VARIABLES)
    if local.isdecimal():
        return int(local) < world_size
    nodes = _read_first(environ, _NODE_COUNT_VARIABLES)
    if nodes.isdecimal():
        return int(nodes) > 1
    master = _find_master_address(environ)
    return bool(master) and not is_loopback(master)


def find_launcher(environ: Mapping[str, str], *, world_size: int) -> JobLauncher:
    """Return the process that started all ranks on this host; for a single process, this process
    itself.

    It is the nearest ancestor that is not a rank: a wrapper between launcher and rank, such as a
    shell or numactl, has the rank's variables too. For ranks without variables, such as spawned
    ones, it is the parent. Lightning's launcher is the first rank itself, which starts the others.
    """
    if world_size <= 1 and not environ.get(_ELASTIC_VARIABLE):
        return _read_process(os.getpid())
    variable = next((name for name in _RANK_VARIABLES if environ.get(name)), "")
    found = _read_process(os.getppid())
    if not variable and environ.get(_NODE_RANK_VARIABLE) and not _is_spawned():
        variable, found = _LOCAL_RANK_VARIABLE, _read_process(os.getpid())
    for _ in range(_MAX_ANCESTORS if variable else 0):
        if found.parent < 1 or not _has_variable(found.pid, variable):
            break
        found = _read_process(found.parent)
    return found


def _find_slurm_job(environ: Mapping[str, str]) -> str:
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")
    if not job:
        return ""
    if step.isdecimal() and int(step) < _MIN_SLURM_OWN_STEP:
        return f"{job}.{step}"
    # The run id separates parallel runs in one batch script.
    run = _find_elastic_run(environ)
    return f"{job}-{run}" if run else job


def _find_elastic_run(environ: Mapping[str, str]) -> str:
    run = environ.get(_ELASTIC_VARIABLE, "")
    return "" if run == _NO_ELASTIC_RUN else run


def _find_master_address(environ: Mapping[str, str]) -> str:
    for address, port in _MASTER_VARIABLES:
        if environ.get(address):
            return f"{environ[address]}:{environ.get(port, '')}"
    return ""


def _read_first(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((environ[name] for name in names if environ.get(name)), "")


def _compute_digest(*parts: str) -> str:
    joined = "\0".join(parts).encode("utf-8", "surrogateescape")
    return hashlib.blake2b(joined, digest_size=4).hexdigest()


def _is_spawned() -> bool:
    processes = sys.modules.get("multiprocessing.process")  # loaded in its child processes
    return processes is not None and processes.parent_process() is not None


def _read_process(pid: int) -> JobLauncher:
    """Return a process with its facts from /proc; if it cannot be read, only with its number."""
    try:
        # The fields follow the program's name, which is in parentheses and may hold any character
        # (proc(5)).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return JobLauncher(pid, int(fields[19]), boot, parent=int(fields[1]))
    except (OSError, ValueError, IndexError):
        return JobLauncher(pid, 0)


def _has_variable(pid: int, name: str) -> bool:
    """Return whether a process was started with a variable; False if its environment cannot be
    read.
    """
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return any(each.startswith(f"{name}=".encode()) for each in environ.split(b"\0"))


WARNED_VARIABLE = "RANKDUMP_WARNED"
"""Variable with the path of the configuration whose warnings were shown before the job began."""

# In each row the first variable that is set counts. The order is torchrun, MindSpore, Open MPI,
# Slurm, because the variables of an outer launcher stay visible inside an inner one.
_RANK_VARIABLES = ("RANK", "RANK_ID", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
_WORLD_SIZE_VARIABLES = ("WORLD_SIZE", "RANK_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS")
# MindSpore compares `support_device` with DEVICE_ID, so this variable comes before the local rank.
_DEVICE_VARIABLES = ("DEVICE_ID", "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
_MAX_VARIABLE_CHARACTERS = 256
_SECRET_BYTES = 32
_PROCESS_US = time.time_ns() // 1000


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """Place of a process in its job."""

    rank: int = 0
    world_size: int = 1
    device: int = 0
    """Local device id, as used in `support_device`."""
    job_id: str = "job"
    spans_hosts: bool = False
    """Whether the job may have ranks on other hosts."""
    restarts: int | None = None
    """Number of times that the launcher had restarted all ranks; None if it does not count them."""


def identify_rank(environ: Mapping[str, str], tree: str) -> RankIdentity:
    """Return the place of this process in the job that dumps into `tree`.

    The place comes from the launcher's variables, else from torch's process group if there is one.
    The group is also used if the launcher sets a size but no rank, as Lightning does. ConfigError
    if a variable is not a number.
    """
    rank = _read_number(environ, _RANK_VARIABLES, 0)
    # RANK_ID without a size is common; the size is made large enough to contain the rank.
    size = max(_read_number(environ, _WORLD_SIZE_VARIABLES, 1), rank + 1)
    if size == 1 or (environ.get(_WORLD_SIZE_VARIABLES[0]) and not environ.get(_RANK_VARIABLES[0])):
        rank, size = find_process_group() or (rank, size)
    return RankIdentity(
        rank=rank,
        world_size=size,
        device=_read_number(environ, _DEVICE_VARIABLES, 0),
        job_id=derive_job_id(
            environ,
            world_size=size,
            tree=tree,
            launcher=find_launcher(environ, world_size=size),
            host=socket.gethostname(),
        ),
        spans_hosts=is_multi_host(environ, world_size=size),
        restarts=find_restarts(environ),
    )


def find_restarts(environ: Mapping[str, str]) -> int | None:
    """Return how often torchrun had restarted all ranks; None if torchrun's count is not set."""
    return _parse_number(environ.get(_RESTART_VARIABLE, ""))


def find_process_group() -> tuple[int, int] | None:
    """Return rank and size in torch's default process group; None if there is none yet."""
    group = sys.modules.get("torch.distributed")
    if group is None or not (group.is_available() and group.is_initialized()):
        return None
    return group.get_rank(), group.get_world_size()


def read_timeout_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that set timeouts of communication, with their values.

    Bytes that are not text are replaced, and long values are cut: no valid timeout has either.
    """
    found = {name: environ[name] for name in TIMEOUT_VARIABLES if environ.get(name)}
    return {
        name: text[:_MAX_VARIABLE_CHARACTERS].encode("utf-8", "replace").decode()
        for name, text in found.items()
    }


def _read_number(environ: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    name = next(filter(environ.get, names), "")
    number = _parse_number(environ[name]) if name else default
    if number is None:
        raise ConfigError("environment", name, environ[name], "a whole number from 0")
    return number


def _parse_number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def make_session_request(
    identity: RankIdentity, *, plan_json: bytes, config_source: bytes
) -> SessionRequest:
    """Return the request of this process for a new session."""
    framework, device_target = _find_framework()
    return SessionRequest(
        job_id=identity.job_id,
        session_id=uuid.uuid4().hex,
        rank=identity.rank,
        world_size=identity.world_size,
        device=identity.device,
        host=socket.gethostname(),
        pid=os.getpid(),
        framework=framework,
        device_target=device_target,
        plan_json=plan_json,
        config_source=config_source,
        secret=secrets.token_bytes(_SECRET_BYTES),
        attempt=identity.restarts or 0,
        is_elastic=identity.restarts is not None,
        started_us=time.time_ns() // 1000,
        process_us=_PROCESS_US,
    )


def _find_framework() -> tuple[str, str]:
    """Return the loaded framework with its version, and the kind of device that it computes on."""
    for name, device_of in (("torch", _find_torch_device), ("mindspore", _find_mindspore_device)):
        module = sys.modules.get(name)
        version = getattr(module, "__version__", None)
        if module is not None and version is not None:  # a folder also counts as a module
            return f"{name} {version}", device_of(module)
    return "numpy", "CPU"


def _find_torch_device(torch: Any) -> str:
    return "GPU" if torch.cuda.is_available() else "CPU"


def _find_mindspore_device(mindspore: Any) -> str:
    return str(mindspore.get_context("device_target"))
