"""Callers of a server, their roles, and the table of the methods that each role may call. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

AGENT_ROLE, OPERATOR_ROLE, READER_ROLE, RANK_ROLE = "agent", "operator", "reader", "rank"
ROLES = (AGENT_ROLE, OPERATOR_ROLE, READER_ROLE, RANK_ROLE)
ROLE_URI = "rankdump://role/"
"""Prefix of the URIs that name roles in the alternative names of a certificate, which may have
several.
"""

_READING_ROLES = frozenset({OPERATOR_ROLE, READER_ROLE})
_ALL_ROLES = frozenset(ROLES)
_WIRE = "/rankdump.wire.v1."
METHOD_ROLES: Mapping[str, frozenset[str]] = {
    f"{_WIRE}AgentService/OpenSession": frozenset({RANK_ROLE}),
    f"{_WIRE}AgentService/Push": frozenset({RANK_ROLE}),
    f"{_WIRE}AgentService/AnswerOrder": frozenset({RANK_ROLE}),
    f"{_WIRE}AgentService/Status": _READING_ROLES,
    f"{_WIRE}AgentService/Control": frozenset({OPERATOR_ROLE}),
    f"{_WIRE}CoordinatorService/Report": frozenset({AGENT_ROLE}),
    f"{_WIRE}CoordinatorService/Clock": frozenset({AGENT_ROLE}),
    f"{_WIRE}CoordinatorService/Status": _READING_ROLES,
    f"{_WIRE}CoordinatorService/Order": _READING_ROLES,
    f"{_WIRE}CoordinatorService/Hints": _READING_ROLES,
    f"{_WIRE}CoordinatorService/Control": frozenset({OPERATOR_ROLE}),
    f"{_WIRE}MetricsService/Metrics": _READING_ROLES,
    "/grpc.health.v1.Health/Check": _ALL_ROLES,
    "/grpc.health.v1.Health/List": _ALL_ROLES,
    "/grpc.health.v1.Health/Watch": _ALL_ROLES,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _ALL_ROLES,
}
"""Roles that may call each method over TLS; a method that is not listed is refused."""


@dataclass(frozen=True, slots=True)
class CallerIdentity:
    """Identity of a caller. A caller over a Unix socket or unencrypted loopback is only known to be
    local.
    """

    name: str
    """Common name of the caller's certificate; it grants nothing."""
    roles: frozenset[str]
    fingerprint: str = ""
    """SHA-256 of the certificate; empty for a local caller."""
    peer: str = ""

    @property
    def is_local(self) -> bool:
        """Whether the caller came over a Unix socket or loopback without TLS."""
        return not self.fingerprint

    @property
    def is_known(self) -> bool:
        """Whether a trusted certificate identifies the caller."""
        return self.fingerprint not in ("", _NO_FINGERPRINT)

    def audit_fields(self) -> dict[str, object]:
        """Return the fields that describe the caller in a line of the audit log."""
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
    """Return a caller over TLS without a trusted certificate."""
    return CallerIdentity("", frozenset(), _NO_FINGERPRINT, peer)


def parse_roles(uris: Iterable[str]) -> frozenset[str]:
    """Return the roles that the alternative names of a certificate give.

    >>> sorted(parse_roles(["rankdump://role/reader", "rankdump://role/king", "https://a"]))
    ['reader']
    """
    named = {uri.removeprefix(ROLE_URI) for uri in uris if uri.startswith(ROLE_URI)}
    return frozenset(named & set(ROLES))


def explain_refusal(
    method: str, caller: CallerIdentity, *, revoked: frozenset[str], own: str = ""
) -> str:
    """Return why this caller may not call a method; empty if it may.

    `own` is the fingerprint of the certificate that may call every method, if there is one.
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
    roles = " or ".join(sorted(allowed)) or "nobody"
    return f"{who} has the wrong role: {short} is for {roles}, and its roles are: {has}"
