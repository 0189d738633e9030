"""What has to be in order for a daemon to be of use: certificates, its coordinator, itself."""

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

from rankdump.contract.addresses import is_socket
from rankdump.contract.errors import RankdumpError, RetryableError, UnavailableError
from rankdump.wire.causes import explained, own_fault
from rankdump.wire.channel import Credentials, connect
from rankdump.wire.errors import error_of
from rankdump.wire.v1 import coordinator_pb2, coordinator_pb2_grpc
from rankdumpd.callers import AGENT
from rankdumpd.settings import TlsSettings
from rankdumpd.tls import check_pair

ANSWER_S = 5.0
"""Longest that a coordinator is given to say what time it is."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """One thing that is not in order, and keeps nothing from starting."""

    text: str
    passes: bool = False
    """Whether it may be over without anybody doing anything."""


def doubts_about(tls: TlsSettings, *, reports_to: str = "") -> Iterator[Doubt]:
    """Yield what is not in order about certificates; ConfigError when files cannot be used.

    `reports_to` is the address of a coordinator, which believes only agents.
    """
    if not tls.on:
        return
    roles = check_pair(tls)
    fault = own_fault(Credentials(tls.ca, tls.certificate, tls.key))
    if fault:
        yield Doubt(fault)
    if reports_to and not is_socket(reports_to) and AGENT not in roles:
        has = " and ".join(roles) or "none"
        yield Doubt(
            f"certificate {tls.certificate} has the roles: {has}; "
            f"the coordinator at {reports_to} takes reports from the role {AGENT} alone"
        )
    text = key_doubt(Path(tls.key), uid=os.geteuid(), groups={os.getegid(), *os.getgroups()})
    if text:
        yield Doubt(text)


def key_doubt(key: Path, *, uid: int, groups: Collection[int]) -> str:
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
        said.append(f"belongs to {_user(found.st_uid)}, who can replace it")
    others = mode & 0o007 or (mode & 0o070 and found.st_gid not in groups)
    if others:
        said.append(f"is open to others (mode {mode:04o}): chmod 0600 {key}")
    return f"private key {key} {' and '.join(said)}" if said else ""


def coordinator_doubt(address: str, credentials: Credentials) -> Doubt | None:
    """Ask a coordinator for the time, as only an agent may; return what came in its place."""
    try:
        with connect(address, credentials) as channel:
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            stub.Clock(coordinator_pb2.ClockRequest(), timeout=ANSWER_S)
    except grpc.RpcError as failure:
        error = error_of(failure)
        if isinstance(error, UnavailableError):
            error = explained(error, address, credentials)
        return _refusal(address, error)
    except RankdumpError as error:
        return _refusal(address, error)
    return None


def health_fault(address: str) -> str:
    """Say why a daemon of this host does not serve; empty when it does."""
    try:
        with connect(address) as channel:
            # Its stub file knows the class but not the calls.
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_S)
    except grpc.RpcError as failure:
        error = error_of(failure)
        return str(explained(error, address) if isinstance(error, UnavailableError) else error)
    except RankdumpError as error:
        return str(error)
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return "" if answer.status == health_pb2.HealthCheckResponse.SERVING else status


def _refusal(address: str, error: RankdumpError) -> Doubt:
    passes = isinstance(error, RetryableError)
    verb = "does not answer" if passes else "refuses this agent"
    return Doubt(f"the coordinator at {address} {verb}: {error}", passes=passes)


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name!r}"
    except KeyError:
        return f"user {uid}"
