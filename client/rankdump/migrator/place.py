"""Where a process stands: its rank, its job's name, and the agent that takes its dump."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from rankdump.embedded import Lease, serving
from rankdump.identity import DEFAULT_AGENT, Identity, identify

_NAMELESS = Identity().job_id
_ANSWER_S = 0.5


def identity_in(environ: Mapping[str, str]) -> Identity:
    """Return this process's place; a job that nobody named is named by who started its ranks.

    An agent may serve several jobs at a time, and merges the ranks of one. ConfigError when a
    launcher's variable is not a number.
    """
    found = _grouped(identify(environ))
    if found.job_id != _NAMELESS:
        return found
    starter = os.getppid() if found.world_size > 1 else os.getpid()
    return replace(found, job_id=f"{_NAMELESS}-{starter}")


def _grouped(identity: Identity) -> Identity:
    """Return the place in torch's process group where no launcher's variable says one."""
    group = sys.modules.get("torch.distributed")
    if identity.world_size > 1 or group is None:
        return identity
    if not (group.is_available() and group.is_initialized()):
        return identity
    return replace(identity, rank=group.get_rank(), world_size=group.get_world_size())


def windowed(identity: Identity, number: int) -> Identity:
    """Return who a process is in its dump of that number, from 0.

    A rank has one session of a job, and orders are told apart by their jobs.
    """
    return replace(identity, job_id=f"{identity.job_id}-{number + 1}") if number else identity


class Agent:
    """Finds the agent of this host once, or brings one along that lasts as long as its job."""

    def __init__(self, environ: Mapping[str, str], lease: Callable[[str], Lease] = Lease) -> None:
        self._environ = environ
        self._lease = lease
        self._address = ""

    def address(self, job_id: str) -> str:
        """Return where it answers; UnavailableError when there is none and none can be started."""
        if not self._address:
            self._address = self._environ.get("RANKDUMP_AGENT") or self._found(job_id)
        return self._address

    def _found(self, job_id: str) -> str:
        if _answers(DEFAULT_AGENT):
            return DEFAULT_AGENT
        lease = self._lease(job_id)
        # Whatever is registered later, such as the end of a session, runs before this.
        atexit.register(lease.close)
        return lease.address


def _answers(address: str) -> bool:
    socket = Path(address.removeprefix("unix:"))
    return socket.exists() and serving(address, timeout_s=_ANSWER_S)
