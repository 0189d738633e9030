"""Which agent takes the dumps of a process: the one that is named, this host's own, or one that its
job brings along.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankdump.contract.addresses import DEFAULT_AGENT
from rankdump.contract.errors import UnavailableError
from rankdump.identity import identify

if TYPE_CHECKING:
    from rankdump.embedded import Lease

logger = logging.getLogger("rankdump")

VARIABLE = "RANKDUMP_AGENT"
_ACCEPT_S = 0.5
_START_S = 5.0
"""Longest a job waits at its start for a daemon that it brings along; tensors wait for it then."""

MakesLease = Callable[[str, bool], "Lease"]
"""Finds or starts the daemon of a job by its id, which merges its order or not."""


@dataclass(frozen=True, slots=True)
class AgentAddress:
    """Where an agent answers, or may answer one day."""

    address: str
    missing: str = ""
    """Why there is none now; empty where there may be one."""


class AgentFinder:
    """Finds the agent of a process once; safe to use from several threads.

    A daemon that it brings along is shared with the other ranks of the job on this host, and lasts
    as long as any of their processes.
    """

    def __init__(
        self,
        lease: MakesLease | None = None,
        why_not: Callable[[str], str] | None = None,
    ) -> None:
        """`why_not` says why no agent answers at an address; empty when one does."""
        self._make_lease = lease or _lease
        self._why_not = why_not or why_none_answers
        self._lock = threading.Lock()
        self._lease: Lease | None = None
        os.register_at_fork(after_in_child=self._forget)

    def find(self, environ: Mapping[str, str], *, embedded: bool = True) -> AgentAddress:
        """Return the agent that RANKDUMP_AGENT names, this host's, or one that is brought along.

        None is brought along where `embedded` is False. What is missing may come yet.
        """
        if environ.get(VARIABLE):
            return AgentAddress(environ[VARIABLE])
        with self._lock:
            if self._lease is not None:
                return AgentAddress(self._lease.address)
            reason = self._why_not(DEFAULT_AGENT)
            if not reason:
                return AgentAddress(DEFAULT_AGENT)
            if not embedded:
                return AgentAddress(DEFAULT_AGENT, f"{reason}, and rankdump.embedded is false")
            try:
                self._lease = self._bring(environ, reason)
            except UnavailableError as error:
                return AgentAddress(DEFAULT_AGENT, f"{reason}, and {error}")
            return AgentAddress(self._lease.address)

    def _bring(self, environ: Mapping[str, str], reason: str) -> Lease:
        # The trees of a process may differ; its daemon is one.
        identity = identify(environ, tree="")
        lease = self._make_lease(identity.job_id, not identity.spans_hosts)
        # Whatever is registered later, such as the end of a session, runs before this.
        atexit.register(_close, lease)
        if lease.started_it:
            logger.warning(
                "rankdump: %s: started one for this job at %s, which ends with the job%s",
                reason,
                lease.address,
                _NOT_MERGED if identity.spans_hosts else "",
            )
        return lease

    def _forget(self) -> None:
        # A fork has no share in its parent's daemon, and may find this lock held.
        self._lock, self._lease = threading.Lock(), None


_NOT_MERGED = (
    "; the order of all ranks is not merged, for they may run on several hosts: that needs an "
    "agent on each of them and a coordinator"
)


def why_none_answers(address: str) -> str:
    """Return why no agent accepts connections on a Unix socket; empty when one does."""
    path = address.removeprefix("unix:")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knock:
        knock.settimeout(_ACCEPT_S)
        try:
            knock.connect(path)
        except PermissionError:
            return f"this user may not use the agent of this host at {path}"
        except OSError:
            return "no agent runs on this host"
    return ""


def _lease(job_id: str, merges: bool) -> Lease:
    # Imported here: a session that is off must not load gRPC.
    from rankdump.embedded import Lease

    return Lease(job_id, merges=merges, start_timeout_s=_START_S)


def _close(lease: Lease) -> None:
    fault = lease.close()
    if fault:
        logger.error("rankdump: %s; its log: %s", fault, lease.log)


finder = AgentFinder()
"""The one of this process."""
