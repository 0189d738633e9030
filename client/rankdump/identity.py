"""Which rank this process is, from its launcher's variables, and how it introduces itself."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rankdump.contract.errors import ConfigError
from rankdump.contract.exchange import SessionRequest
from rankdump.contract.timeouts import VARIABLES
from rankdump.job_id import job_id_of, launcher_of, spans_hosts

WARNED_VARIABLE = "RANKDUMP_WARNED"
"""Names the configuration whose warnings were said before the job began."""

# In each row the first variable that is set counts: torchrun's names, then MindSpore's, Open
# MPI's and Slurm's, because an outer launcher's variables stay visible inside an inner one.
_RANK = ("RANK", "RANK_ID", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
_WORLD_SIZE = ("WORLD_SIZE", "RANK_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS")
# MindSpore compares support_device with DEVICE_ID, so an explicit one wins over the local rank.
_DEVICE = ("DEVICE_ID", "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
_MAX_TEXT = 256
_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Identity:
    """A process's place in its job."""

    rank: int = 0
    world_size: int = 1
    device: int = 0
    """Local device id, the one support_device speaks of."""
    job_id: str = "job"
    spans_hosts: bool = False
    """Whether the job may have ranks on other hosts."""


def identify(environ: Mapping[str, str], tree: str) -> Identity:
    """Return the place of this process in the job that dumps into `tree`.

    It comes from the launcher's variables, else from torch's process group where there is one.
    ConfigError when a variable is not a number.
    """
    rank = _number(environ, _RANK, 0)
    # A lone RANK_ID without a size is common; a rank is always inside its world.
    size = max(_number(environ, _WORLD_SIZE, 1), rank + 1)
    if size == 1:
        rank, size = process_group() or (rank, size)
    return Identity(
        rank=rank,
        world_size=size,
        device=_number(environ, _DEVICE, 0),
        job_id=job_id_of(
            environ,
            world_size=size,
            tree=tree,
            launcher=launcher_of(environ, world_size=size),
            host=socket.gethostname(),
        ),
        spans_hosts=spans_hosts(environ, world_size=size),
    )


def process_group() -> tuple[int, int] | None:
    """Return rank and size of torch's default process group; None where there is none yet."""
    group = sys.modules.get("torch.distributed")
    if group is None or not (group.is_available() and group.is_initialized()):
        return None
    return group.get_rank(), group.get_world_size()


def limits_in(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that say how long communication may wait, as far as they are set.

    What is no text is replaced and what is endless is cut: no limit is either.
    """
    found = {name: environ[name] for name in VARIABLES if environ.get(name)}
    return {
        name: text[:_MAX_TEXT].encode("utf-8", "replace").decode() for name, text in found.items()
    }


def _number(environ: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    for name in names:
        text = environ.get(name, "")
        if text:
            if not (text.isascii() and text.isdigit() and len(text) < 10):
                raise ConfigError("environment", name, text, "a whole number from 0")
            return int(text)
    return default


def introduction(identity: Identity, *, plan_json: bytes, config_source: bytes) -> SessionRequest:
    """Return what a new session of this process tells the agent."""
    framework, device_target = _framework()
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
    )


def _framework() -> tuple[str, str]:
    """Return the framework that is loaded, with its version, and what it computes on."""
    for name, device_of in (("torch", _torch_device), ("mindspore", _mindspore_device)):
        module = sys.modules.get(name)
        version = getattr(module, "__version__", None)
        if module is not None and version is not None:  # a folder of that name is a module, too
            return f"{name} {version}", device_of(module)
    return "numpy", "CPU"


def _torch_device(torch: Any) -> str:
    return "GPU" if torch.cuda.is_available() else "CPU"


def _mindspore_device(mindspore: Any) -> str:
    return str(mindspore.get_context("device_target"))
