"""Roles of callers, and the texts of refusals."""

from __future__ import annotations

import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection
from hypothesis import given
from hypothesis import strategies as st

from rankdump._core.caller_roles import (
    LOCAL_CALLER,
    METHOD_ROLES,
    ROLES,
    CallerIdentity,
    explain_refusal,
    parse_roles,
)
from rankdump._core.plan import DumpPlan, OutputSettings, plan_to_json
from rankdump.wire.v1 import agent_pb2, coordinator_pb2, metrics_pb2
from rankdumpd.server.call_descriptions import describe_request

OURS = [
    service.full_name
    for file in (agent_pb2, coordinator_pb2, metrics_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
]
SERVICES = [*OURS, health.SERVICE_NAME, reflection.SERVICE_NAME]
OPEN = ("/grpc.health", "/grpc.reflection")


def methods_of(service: str) -> list[str]:
    found = descriptor_pool.Default().FindServiceByName(service)
    return [f"/{service}/{method.name}" for method in found.methods]


def caller(*roles: str) -> CallerIdentity:
    return CallerIdentity("somebody", frozenset(roles), "f" * 64, "ipv4:1.2.3.4:5")


def may(role: str) -> set[str]:
    return {m for m in METHOD_ROLES if not explain_refusal(m, caller(role), revoked=frozenset())}


@pytest.mark.parametrize("service", SERVICES)
def test_method_roles_list_every_method(service: str):
    """Law: every method of a registered service is listed."""
    assert set(methods_of(service)) <= set(METHOD_ROLES)


def test_roles_may_call_their_methods_only():
    """Readers change nothing, ranks read nothing, and only agents report."""
    short = {role: {m.rpartition(".")[2] for m in may(role) if m[1:5] != "grpc"} for role in ROLES}
    reads = {
        "AgentService/Status",
        "CoordinatorService/Status",
        "CoordinatorService/Order",
        "CoordinatorService/Hints",
        "MetricsService/Metrics",
    }
    assert short == {
        "agent": {"CoordinatorService/Report", "CoordinatorService/Clock"},
        "operator": reads | {"AgentService/Control", "CoordinatorService/Control"},
        "reader": reads,
        "rank": {"AgentService/OpenSession", "AgentService/Push", "AgentService/AnswerOrder"},
    }


def test_health_and_reflection_need_any_role():
    for method in METHOD_ROLES:
        if method.startswith(OPEN):
            assert not any(explain_refusal(method, caller(r), revoked=frozenset()) for r in ROLES)
        assert "its roles are: none" in explain_refusal(method, caller(), revoked=frozenset())


@given(st.text(max_size=40), st.sets(st.sampled_from(ROLES)))
def test_unlisted_method_is_refused(method: str, roles: set[str]):
    """Law: a new method is refused until the table lists it."""
    assert method in METHOD_ROLES or "is for nobody" in explain_refusal(
        method, caller(*roles), revoked=frozenset()
    )


@pytest.mark.parametrize("method", METHOD_ROLES)
def test_local_callers_may_call_everything(method: str):
    assert not explain_refusal(method, LOCAL_CALLER, revoked=frozenset({""}))


@pytest.mark.parametrize("method", METHOD_ROLES)
def test_revoked_certificate_is_refused_for_every_method(method: str):
    """The server's own certificate too."""
    who = caller(*ROLES)
    listed = frozenset({who.fingerprint})
    assert explain_refusal(method, who, revoked=listed, own=who.fingerprint).endswith("is revoked")


def test_own_certificate_may_call_everything_if_configured():
    who = caller("agent")
    method = "/rankdump.wire.v1.AgentService/Control"
    assert "AgentService/Control is for operator, and its roles are: agent" in explain_refusal(
        method, who, revoked=frozenset()
    )
    assert not explain_refusal(method, who, revoked=frozenset(), own=who.fingerprint)


@given(st.lists(st.text(max_size=30)))
def test_roles_are_parsed_from_known_uris_only(uris: list[str]):
    """Law: any certificate gives a subset of the known roles."""
    assert parse_roles([*uris, "rankdump://role/rank", "rankdump://role/root"]) <= set(ROLES)
    assert parse_roles(
        ["RANKDUMP://role/rank", "rankdump://role/rank/x", " rankdump://role/rank"]
    ) == (frozenset())


def test_describe_request_returns_ids_and_no_secrets():
    plan = plan_to_json(DumpPlan(OutputSettings(root="/var/dump")))
    opened = agent_pb2.OpenSessionRequest(
        job_id="j", session_id="s", rank=3, plan_json=plan, secret=b"hush"
    )
    assert describe_request(opened) == {"job": "j", "session": "s", "rank": 3, "root": "/var/dump"}
    opened.plan_json = b"{"
    assert describe_request(opened)["root"] == ""
    hello = agent_pb2.PushRequest(hello=agent_pb2.Hello(session_id="s", token=b"hush"))
    assert describe_request(hello) == {"session": "s"}
    drain, none = agent_pb2.ControlRequest(drain=agent_pb2.Drain()), agent_pb2.ControlRequest()
    assert (describe_request(drain), describe_request(none)) == (
        {"action": "drain"},
        {"action": "none"},
    )
    for pinned, action in ((True, "pin"), (False, "unpin")):
        pin = agent_pb2.ControlRequest(pin=agent_pb2.Pin(job_id="j", pinned=pinned))
        assert describe_request(pin) == {"action": action, "job": "j"}
    report = coordinator_pb2.ReportRequest(agent_id="a", host="h")
    assert describe_request(report) == {"agent": "a", "host": "h"}
    assert describe_request(coordinator_pb2.OrderRequest(job_id="j")) == {"job": "j"}
    assert describe_request(agent_pb2.AgentStatusRequest()) == {}
