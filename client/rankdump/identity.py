"""Which rank this process is, from its launcher's variables, and how it introduces itself."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from rankdump.contract.errors import ConfigError
from rankdump.contract.exchange import SessionRequest
from rankdump.contract.timeouts import VARIABLES

DEFAULT_AGENT = "unix:/run/rankdump/agent.sock"
"""Where the agent of a host answers unless RANKDUMP_AGENT says otherwise."""
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
_JOB = ("RANKDUMP_JOB_ID", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")


@dataclass(frozen=True, slots=True)
class Identity:
    """A process's place in its job."""

    rank: int = 0
    world_size: int = 1
    device: int = 0
    """Local device id, the one support_device speaks of."""
    job_id: str = "job"


def identify(environ: Mapping[str, str]) -> Identity:
    """Read the place from the launcher's variables; ConfigError when one is not a number."""
    rank = _number(environ, _RANK, 0)
    job = next((environ[name] for name in _JOB if environ.get(name)), "job")
    return Identity(
        rank=rank,
        # A lone RANK_ID without a size is common; a rank is always inside its world.
        world_size=max(_number(environ, _WORLD_SIZE, 1), rank + 1),
        device=_number(environ, _DEVICE, 0),
        job_id=job,
    )


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
    torch = sys.modules.get("torch")
    version = getattr(torch, "__version__", None)
    if torch is None or version is None:  # a folder of that name is a module, too
        return "numpy", "CPU"
    return f"torch {version}", "GPU" if torch.cuda.is_available() else "CPU"
