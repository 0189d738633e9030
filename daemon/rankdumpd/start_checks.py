"""Checks before a daemon starts, and the health check of a running daemon.

The settings of one process are checked where they concern more than a single value: addresses, the
group on this host, and folders that exclude each other. Certificates, private key and coordinator
are checked as well. A start fails only if a setting or a certificate file cannot be used;
`--check-config` and a reload check the settings, too. All other problems are warnings.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rankdump._core import tree_root
from rankdump._core.caller_roles import AGENT_ROLE
from rankdump._core.daemon_endpoint import is_socket_address
from rankdump._wire.channel import (
    TlsCredentials,
    explain_failure,
    find_credentials_fault,
    open_channel,
)
from rankdump.errors import ConfigError, RankdumpError, RejectedError, RetryableError
from rankdump.wire.v1 import coordinator_pb2, coordinator_pb2_grpc
from rankdumpd.agent.shm.slab_folder import find_group_id
from rankdumpd.ingest.folder import check_separate_folders
from rankdumpd.server.grpc_server import check_address
from rankdumpd.server.metrics_page import parse_metrics_address
from rankdumpd.server.tls import check_key_pair, check_server_files
from rankdumpd.settings import AgentSettings, DaemonSettings, TlsSettings
from rankdumpd.workers.supervisor import build_worker_address


def check_agent_settings(settings: DaemonSettings) -> None:
    """Raise the ConfigError with which an agent or a standalone daemon would not start."""
    agent = settings.agent
    check_address("agent.listen", agent.listen, has_tls=settings.tls.on)
    if agent.workers > 1:
        # The socket path of a worker is longer than that of its agent, so the longest one is
        # checked.
        last = build_worker_address(agent.listen, agent.workers - 1)
        check_address("agent.listen", last, has_tls=settings.tls.on)
    _check_common_settings(settings)
    if agent.ingest_dir:
        _check_ingest(agent)


def check_coordinator_settings(settings: DaemonSettings) -> None:
    """Raise the ConfigError with which a coordinator would not start."""
    check_address("coordinator.listen", settings.coordinator.listen, has_tls=settings.tls.on)
    _check_common_settings(settings)


def _check_common_settings(settings: DaemonSettings) -> None:
    # The socket of the coordinator belongs to the group in `agent.runtime_group` as well.
    find_group_id(settings.agent.runtime_group)
    if settings.metrics.listen:
        parse_metrics_address(settings.metrics.listen, has_tls=settings.tls.on)


def _check_ingest(settings: AgentSettings) -> None:
    tree = settings.ingest_into
    try:
        check_separate_folders(Path(settings.ingest_dir), Path(tree))
        tree_root.check_root(tree, tree_root.split_roots(settings.roots), resolve=os.path.realpath)
    except ConfigError as error:
        allowed = error.allowed
    except RejectedError as error:
        allowed = str(error)
    else:
        return
    raise ConfigError("settings", "agent.ingest_into", tree, allowed)


COORDINATOR_TIMEOUT_S = 5.0
"""Longest wait for the answer of a coordinator or daemon."""


@dataclass(frozen=True, slots=True)
class StartWarning:
    """A problem that does not prevent a start."""

    text: str
    is_temporary: bool = False
    """Whether the problem may pass without a change by an operator."""


def check_certificates(
    tls: TlsSettings, *, reports_to: str = "", listens: Iterable[str] = ()
) -> Iterator[StartWarning]:
    """Yield the problems of certificates; ConfigError when their files cannot be used.

    `reports_to` is the address of a coordinator, which accepts reports from the role `agent` only;
    `listens` are the addresses of this process's own servers.
    """
    if not tls.on:
        return
    roles = check_key_pair(tls)
    if any(address and not is_socket_address(address) for address in listens):
        check_server_files(tls)
    fault = find_credentials_fault(TlsCredentials(tls.ca, tls.certificate, tls.key))
    if fault:
        yield StartWarning(fault)
    if reports_to and not is_socket_address(reports_to) and AGENT_ROLE not in roles:
        has = " and ".join(roles) or "none"
        yield StartWarning(
            f"certificate {tls.certificate} has the roles: {has}; "
            f"the coordinator at {reports_to} accepts reports from the role {AGENT_ROLE} only"
        )
    text = check_private_key(
        Path(tls.key), uid=os.geteuid(), groups={os.getegid(), *os.getgroups()}
    )
    if text:
        yield StartWarning(text)


def check_private_key(key: Path, *, uid: int, groups: Collection[int]) -> str:
    """Return why a private key is not private; empty when it is.

    Only root, the user of the process and, for reading, its groups may have access.
    """
    try:
        found = key.stat()
    except OSError as error:
        return f"private key {key}: {error.strerror}"
    mode = stat.S_IMODE(found.st_mode)
    problems: list[str] = []
    if found.st_uid not in (0, uid):
        problems.append(f"belongs to {_name_user(found.st_uid)}, who can replace it")
    others = mode & 0o007 or (mode & 0o070 and found.st_gid not in groups)
    if others:
        problems.append(f"is accessible to others (mode {mode:04o}): chmod 0600 {key}")
    return f"private key {key} {' and '.join(problems)}" if problems else ""


def check_coordinator(address: str, credentials: TlsCredentials) -> StartWarning | None:
    """Call a method of a coordinator that only agents may call; return why it failed, or None."""
    try:
        with open_channel(address, credentials) as channel:
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            stub.Clock(coordinator_pb2.ClockRequest(), timeout=COORDINATOR_TIMEOUT_S)
    except (grpc.RpcError, RankdumpError) as failure:
        error = explain_failure(failure, address, credentials)
        passes = isinstance(error, RetryableError)
        verb = "does not answer" if passes else "refuses this agent"
        text = f"the coordinator at {address} {verb}: {error}"
        return StartWarning(text, is_temporary=passes)
    return None


def check_health(address: str, credentials: TlsCredentials) -> str:
    """Return why no daemon serves at an address; empty when one does."""
    try:
        with open_channel(address, credentials) as channel:
            # The type stubs contain the class, but not its methods.
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=COORDINATOR_TIMEOUT_S)
    except (grpc.RpcError, RankdumpError) as failure:
        return str(explain_failure(failure, address, credentials))
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return "" if answer.status == health_pb2.HealthCheckResponse.SERVING else status


def _name_user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name!r}"
    except KeyError:
        return f"user {uid}"
