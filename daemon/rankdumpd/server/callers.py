"""Callers, their roles, and one table of what each role may call. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rankdump._core.plan import plan_from_json
from rankdump.errors import RankdumpError
from rankdump.wire.v1 import agent_pb2, coordinator_pb2

AGENT_ROLE, OPERATOR_ROLE, READER_ROLE, RANK_ROLE = "agent", "operator", "reader", "rank"
ROLES = (AGENT_ROLE, OPERATOR_ROLE, READER_ROLE, RANK_ROLE)
ROLE_URI = "rankdump://role/"
"""Before the role's name, an alternative name of a certificate; it may have several."""

_READING_ROLES = frozenset({OPERATOR_ROLE, READER_ROLE})
_ALL_ROLES = frozenset(ROLES)
_WIRE = "/rankdump.wire.v1."
METHOD_ROLES: Mapping[str, frozenset[str]] = {
    f"{_WIRE}AgentService/OpenSession": frozenset({RANK_ROLE}),
    f"{_WIRE}AgentService/Push": frozenset({RANK_ROLE}),
    f"{_WIRE}AgentService/Status": _READING_ROLES,
    f"{_WIRE}AgentService/Control": frozenset({OPERATOR_ROLE}),
    f"{_WIRE}CoordinatorService/Report": frozenset({AGENT_ROLE}),
    f"{_WIRE}CoordinatorService/Clock": frozenset({AGENT_ROLE}),
    f"{_WIRE}CoordinatorService/Status": _READING_ROLES,
    f"{_WIRE}CoordinatorService/Order": _READING_ROLES,
    f"{_WIRE}CoordinatorService/Hints": _READING_ROLES,
    f"{_WIRE}MetricsService/Metrics": _READING_ROLES,
    "/grpc.health.v1.Health/Check": _ALL_ROLES,
    "/grpc.health.v1.Health/List": _ALL_ROLES,
    "/grpc.health.v1.Health/Watch": _ALL_ROLES,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _ALL_ROLES,
}
"""Roles by method; what is not here is for nobody who comes over TLS."""


@dataclass(frozen=True, slots=True)
class CallerIdentity:
    """Who calls: over a socket or loopback in the clear all that is known is `local`."""

    name: str
    """Common name of the certificate; not believed for anything."""
    roles: frozenset[str]
    fingerprint: str = ""
    """Of the certificate, SHA-256; empty for one without."""
    peer: str = ""

    @property
    def is_local(self) -> bool:
        """Whether the file system or this host let it in."""
        return not self.fingerprint

    @property
    def is_known(self) -> bool:
        """Whether a certificate that is believed says who it is."""
        return self.fingerprint not in ("", _NO_FINGERPRINT)

    def audit_fields(self) -> dict[str, object]:
        """Return what is written down of it."""
        if self.is_local:
            return {"who": "local"}
        return {
            "who": self.name,
            "roles": sorted(self.roles),
            "fingerprint": self.fingerprint,
            "peer": self.peer,
        }


LOCAL_CALLER = CallerIdentity("local", frozenset(ROLES))
_NO_FINGERPRINT = "none"


def build_unknown_caller(peer: str) -> CallerIdentity:
    """Return a caller over TLS who shows no certificate that is believed."""
    return CallerIdentity("", frozenset(), _NO_FINGERPRINT, peer)


def parse_roles(uris: Iterable[str]) -> frozenset[str]:
    """Return the roles that the alternative names of a certificate give.

    >>> sorted(roles_in(["rankdump://role/reader", "rankdump://role/king", "https://a"]))
    ['reader']
    """
    named = {uri.removeprefix(ROLE_URI) for uri in uris if uri.startswith(ROLE_URI)}
    return frozenset(named & set(ROLES))


def explain_refusal(
    method: str, caller: CallerIdentity, *, revoked: frozenset[str], own: str = ""
) -> str:
    """Return why a call is not for this caller; empty when it is.

    `own` is the fingerprint of the certificate that may do everything, if there is one.
    """
    if caller.is_local:
        return ""
    who = f"the certificate of {caller.name!r}"
    if caller.fingerprint in revoked:
        return f"{who} is revoked"
    if own and caller.fingerprint == own:
        return ""
    allowed = METHOD_ROLES.get(method, frozenset())
    if caller.roles & allowed:
        return ""
    short = method.rpartition(".")[2]
    has = " and ".join(sorted(caller.roles)) or "none"
    wanted = " or ".join(sorted(allowed)) or "nobody"
    return f"{who} has the wrong role: {short} is for {wanted}, and its roles are: {has}"


def describe_request(message: object) -> dict[str, object]:
    """Return what a request is about, of the names that are written down."""
    if isinstance(message, agent_pb2.OpenSessionRequest):
        return {
            "job": message.job_id,
            "session": message.session_id,
            "rank": message.rank,
            "root": _read_plan_root(message.plan_json),
        }
    if isinstance(message, agent_pb2.PushRequest):
        return {"session": message.hello.session_id}
    if isinstance(message, agent_pb2.ControlRequest):
        return _describe_action(message)
    if isinstance(message, coordinator_pb2.ReportRequest):
        return {"agent": message.agent_id, "host": message.host}
    named = (
        coordinator_pb2.CoordinatorStatusRequest,
        coordinator_pb2.OrderRequest,
        coordinator_pb2.HintsRequest,
    )
    return {"job": message.job_id} if isinstance(message, named) else {}


def _describe_action(message: agent_pb2.ControlRequest) -> dict[str, object]:
    if message.HasField("pin"):
        action = "pin" if message.pin.pinned else "unpin"
        return {"action": action, "job": message.pin.job_id}
    return {"action": "drain" if message.HasField("drain") else "none"}


def _read_plan_root(plan_json: bytes) -> str:
    try:
        return plan_from_json(plan_json).output.root
    except RankdumpError:
        return ""
