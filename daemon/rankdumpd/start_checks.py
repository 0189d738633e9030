"""Checks before a daemon starts: its certificates and private key, its coordinator, and the health
of a running daemon. Nothing here keeps a daemon from starting but files that cannot be used.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rankdump._core.daemon_endpoint import is_socket_address
from rankdump._wire.channel import (
    TlsCredentials,
    explain_unavailable,
    find_credentials_fault,
    make_error,
    open_channel,
)
from rankdump.errors import RankdumpError, RetryableError, UnavailableError
from rankdump.wire.v1 import coordinator_pb2, coordinator_pb2_grpc
from rankdumpd.server.callers import AGENT_ROLE
from rankdumpd.server.tls import check_key_pair
from rankdumpd.settings import TlsSettings

COORDINATOR_TIMEOUT_S = 5.0
"""Longest that a coordinator is given to say what time it is."""


@dataclass(frozen=True, slots=True)
class StartWarning:
    """One thing that is not in order, and keeps nothing from starting."""

    text: str
    is_temporary: bool = False
    """Whether it may be over without anybody doing anything."""


def check_certificates(tls: TlsSettings, *, reports_to: str = "") -> Iterator[StartWarning]:
    """Yield what is not in order about certificates; ConfigError when files cannot be used.

    `reports_to` is the address of a coordinator, which believes only agents.
    """
    if not tls.on:
        return
    roles = check_key_pair(tls)
    fault = find_credentials_fault(TlsCredentials(tls.ca, tls.certificate, tls.key))
    if fault:
        yield StartWarning(fault)
    if reports_to and not is_socket_address(reports_to) and AGENT_ROLE not in roles:
        has = " and ".join(roles) or "none"
        yield StartWarning(
            f"certificate {tls.certificate} has the roles: {has}; "
            f"the coordinator at {reports_to} takes reports from the role {AGENT_ROLE} alone"
        )
    text = check_private_key(
        Path(tls.key), uid=os.geteuid(), groups={os.getegid(), *os.getgroups()}
    )
    if text:
        yield StartWarning(text)


def check_private_key(key: Path, *, uid: int, groups: Collection[int]) -> str:
    """Say who else may read a private key, or whose it is; empty when it is in good hands.

    Good hands are the process and root, and a group of the process that may read it.
    """
    try:
        found = key.stat()
    except OSError as error:
        return f"private key {key}: {error.strerror}"
    mode = stat.S_IMODE(found.st_mode)
    said: list[str] = []
    if found.st_uid not in (0, uid):
        said.append(f"belongs to {_name_user(found.st_uid)}, who can replace it")
    others = mode & 0o007 or (mode & 0o070 and found.st_gid not in groups)
    if others:
        said.append(f"is open to others (mode {mode:04o}): chmod 0600 {key}")
    return f"private key {key} {' and '.join(said)}" if said else ""


def check_coordinator(address: str, credentials: TlsCredentials) -> StartWarning | None:
    """Ask a coordinator for the time, as only an agent may; return what came in its place."""
    try:
        with open_channel(address, credentials) as channel:
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            stub.Clock(coordinator_pb2.ClockRequest(), timeout=COORDINATOR_TIMEOUT_S)
    except grpc.RpcError as failure:
        error = make_error(failure)
        if isinstance(error, UnavailableError):
            error = explain_unavailable(error, address, credentials)
        return _build_refusal_warning(address, error)
    except RankdumpError as error:
        return _build_refusal_warning(address, error)
    return None


def check_health(address: str) -> str:
    """Say why a daemon of this host does not serve; empty when it does."""
    try:
        with open_channel(address) as channel:
            # Its stub file knows the class but not the calls.
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=COORDINATOR_TIMEOUT_S)
    except grpc.RpcError as failure:
        error = make_error(failure)
        return str(
            explain_unavailable(error, address) if isinstance(error, UnavailableError) else error
        )
    except RankdumpError as error:
        return str(error)
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return "" if answer.status == health_pb2.HealthCheckResponse.SERVING else status


def _build_refusal_warning(address: str, error: RankdumpError) -> StartWarning:
    passes = isinstance(error, RetryableError)
    verb = "does not answer" if passes else "refuses this agent"
    return StartWarning(f"the coordinator at {address} {verb}: {error}", is_temporary=passes)


def _name_user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name!r}"
    except KeyError:
        return f"user {uid}"
