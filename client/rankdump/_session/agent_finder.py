"""Finder of the agent that receives the dumps of a process: the agent in RANKDUMP_AGENT, the agent
of this host, or an embedded one that the job starts. gRPC is loaded only for an embedded one.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rankdump._core.daemon_endpoint import DEFAULT_AGENT_ADDRESS
from rankdump._core.rank_identity import RankIdentity, identify_rank
from rankdump.errors import RankdumpError, UnavailableError

if TYPE_CHECKING:
    from rankdump._embedded_daemon import DaemonLease

_logger = logging.getLogger("rankdump")

AGENT_VARIABLE = "RANKDUMP_AGENT"
_CONNECT_TIMEOUT_S = 0.5

LeaseFactory = Callable[[str, bool], "DaemonLease"]
"""Finds or starts the daemon of a job, given the job's id and whether the daemon also merges the
execution order.
"""


@dataclass(frozen=True, slots=True)
class AgentAddress:
    """Address of an agent that runs or may be started later."""

    address: str
    missing: str = ""
    """Reason why no agent runs at the address now; empty if one may run."""
    is_starting: Callable[[], bool] | None = field(default=None, compare=False)
    """Returns whether the agent is still starting; raises UnavailableError if it has ended. None
    for an agent that this job did not start, or that already serves.
    """


class AgentFinder:
    """Finds the agent of a process once; safe to use from several threads.

    An embedded daemon is shared with the other ranks of the job on this host, and lasts as long as
    any of their processes.
    """

    def __init__(
        self,
        lease: LeaseFactory | None = None,
        explain_missing: Callable[[str], str] | None = None,
    ) -> None:
        """`explain_missing` returns why no agent runs at an address; empty if one does."""
        self._make_lease = lease or _make_lease
        self._explain_missing = explain_missing or explain_missing_agent
        self._lock = threading.Lock()
        self._lease: DaemonLease | None = None
        self._job_id = ""
        """Id of the job that the embedded agent belongs to."""
        self._is_used = False
        """Whether a session was given the address of the embedded agent."""
        os.register_at_fork(after_in_child=self._forget)

    def prepare(self, environ: Mapping[str, str]) -> None:
        """Start an embedded agent now if `find` would start one, without waiting for it."""
        if environ.get(AGENT_VARIABLE):
            return
        with self._lock:
            if self._lease is None and self._explain_missing(DEFAULT_AGENT_ADDRESS):
                with suppress(RankdumpError):  # `find` tries again, and reports the reason
                    self._take_lease(identify_rank(environ, tree=""))

    def find(
        self, environ: Mapping[str, str], *, embedded: bool = True, waits: bool = True
    ) -> AgentAddress:
        """Return the address of the agent in RANKDUMP_AGENT, of this host's agent, or of an
        embedded one.

        If `embedded` is False, no agent is started. If `waits` is False, an agent that was started
        may not serve yet. An agent that is missing may be started later.
        """
        if environ.get(AGENT_VARIABLE):
            return AgentAddress(environ[AGENT_VARIABLE])
        with self._lock:
            if self._lease is not None and self._is_used:
                return _make_address(self._lease)
            reason = self._explain_missing(DEFAULT_AGENT_ADDRESS)
            if not reason:
                return AgentAddress(DEFAULT_AGENT_ADDRESS)
            if not embedded:
                return AgentAddress(
                    DEFAULT_AGENT_ADDRESS, f"{reason}, and rankdump.embedded is false"
                )
            try:
                return self._use_lease(identify_rank(environ, tree=""), reason, waits=waits)
            except UnavailableError as error:
                return AgentAddress(DEFAULT_AGENT_ADDRESS, f"{reason}, and {error}")

    def _use_lease(self, identity: RankIdentity, reason: str, *, waits: bool) -> AgentAddress:
        """Return the address of the embedded agent; UnavailableError if there is none."""
        lease = self._take_lease(identity)
        try:
            if waits:
                lease.wait_until_serving()
            found = _make_address(lease)
        except UnavailableError:
            self._lease = None
            lease.close()
            raise
        self._is_used = True
        if lease.started_it:
            _logger.warning(
                "rankdump: %s: started an agent for this job at %s; it ends with the job%s",
                reason,
                lease.address,
                _NOT_MERGED_NOTE if identity.spans_hosts else "",
            )
        return found

    def _take_lease(self, identity: RankIdentity) -> DaemonLease:
        """Return the lease of the job's embedded agent, which is started if necessary.

        A process may dump to several trees, but has one daemon.
        """
        job_id = identity.job_id
        if self._lease is not None and self._job_id != job_id:
            # The process group was created after `prepare`, so the lease is for another job id.
            self._lease.close()
            self._lease = None
        if self._lease is None:
            self._job_id = job_id
            self._lease = self._make_lease(job_id, not identity.spans_hosts)
            # Functions that are registered later, such as the end of a session, run before this
            # one.
            atexit.register(_close_lease, self._lease)
        return self._lease

    def _forget(self) -> None:
        # A forked child has no share in its parent's daemon, and another thread may have held the
        # lock during the fork.
        self._lock, self._lease = threading.Lock(), None


_NOT_MERGED_NOTE = (
    "; the execution orders of the ranks are not merged, because the job may span several hosts: "
    "run an agent on each host, and a coordinator"
)


def explain_missing_agent(address: str) -> str:
    """Return why no agent accepts connections on a Unix socket; empty if one does."""
    path = address.removeprefix("unix:")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_TIMEOUT_S)
        try:
            probe.connect(path)
        except PermissionError:
            return f"this user is not permitted to use the agent of this host at {path}"
        except OSError:
            return "no agent runs on this host"
    return ""


def _make_lease(job_id: str, merges: bool) -> DaemonLease:
    # Imported here: a session that is off must not load gRPC.
    from rankdump._embedded_daemon import DaemonLease

    return DaemonLease(job_id, merges=merges)


def _make_address(lease: DaemonLease) -> AgentAddress:
    return AgentAddress(
        lease.address, is_starting=lease.is_starting if lease.is_starting() else None
    )


def _close_lease(lease: DaemonLease) -> None:
    fault = lease.close()
    if fault:
        _logger.error("rankdump: %s; log file of the daemon: %s", fault, lease.log)


default_agent_finder = AgentFinder()
"""The finder of this process."""
