"""The job of the live page: which daemon answers at its address, and who may control."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from support.agent_double import FakeAgent
from support.job_sources import make_view

from rankdump._cli.job_connection import JobConnection, has_operator_role
from rankdump._core.job_control import ControlAction, ControlOrder
from rankdump._core.status import BlackBoxStatus, MergeStatus, StatusView
from rankdump._wire.status_messages import view_to_wire
from rankdump.errors import ConfigError, ForbiddenError, RejectedError, UnavailableError
from rankdump.wire.v1 import agent_pb2, agent_pb2_grpc, coordinator_pb2, coordinator_pb2_grpc

AGENT_VIEW = StatusView(make_view("train").sessions, black_box=BlackBoxStatus(steps=5))
MERGED_VIEW = StatusView(make_view("train", ranks=4).sessions, merges=(MergeStatus("train", 3),))


class OwnAgent(FakeAgent):
    """Answers with a status, and freezes."""

    is_forbidden = False

    def Status(self, request, context):  # noqa: N802 - the name is the service's
        if self.is_forbidden:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "wrong role")
        return agent_pb2.AgentStatusResponse(view=view_to_wire(AGENT_VIEW))

    def Control(self, request, context):  # noqa: N802 - the name is the service's
        assert request.freeze.job_id == "train"
        return agent_pb2.ControlResponse(trees=["/data/blackbox/7"], notes=[request.freeze.text])


class OwnCoordinator(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Answers with a status, and keeps requests."""

    def __init__(self) -> None:
        self.view = MERGED_VIEW
        self.orders: list[coordinator_pb2.JobControlRequest] = []

    def Status(self, request, context):  # noqa: N802 - the name is the service's
        return coordinator_pb2.CoordinatorStatusResponse(view=view_to_wire(self.view))

    def Control(self, request, context):  # noqa: N802 - the name is the service's
        self.orders.append(request)
        late = coordinator_pb2.ControlledRank(rank=1, reason="it has ended its session")
        ranks = [coordinator_pb2.ControlledRank(rank=0, iteration=9), late]
        return coordinator_pb2.JobControlResponse(iteration=9, ranks=ranks)

    def Clock(self, request, context):  # noqa: N802 - the name is the service's
        raise NotImplementedError

    def Order(self, request, context):  # noqa: N802 - the name is the service's
        raise NotImplementedError

    def Hints(self, request, context):  # noqa: N802 - the name is the service's
        raise NotImplementedError

    def Report(self, request_iterator, context):  # noqa: N802 - the name is the service's
        raise NotImplementedError


@pytest.fixture
def serve(socket_folder) -> Iterator[Callable[..., str]]:
    """A function that serves some services at the same address, in place of those before."""
    servers: list[grpc.Server] = []

    def make(*services: object) -> str:
        while servers:
            servers.pop().stop(None).wait()
        server = grpc.server(ThreadPoolExecutor(2))
        for service in services:
            if isinstance(service, OwnAgent):
                agent_pb2_grpc.add_AgentServiceServicer_to_server(service, server)
            if isinstance(service, OwnCoordinator):
                coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(service, server)
        where = f"unix:{socket_folder}/a.sock"
        server.add_insecure_port(where)
        server.start()
        servers.append(server)
        return where

    yield make
    for server in servers:
        server.stop(None).wait()


def order(action: ControlAction, *values: str) -> ControlOrder:
    return ControlOrder("id-1", "train", action, values)


def test_agent_alone_shows_its_status_and_freezes(serve):
    connection = JobConnection(serve(OwnAgent()))
    assert connection.list_actions() == ()
    assert connection.read_status() == AGENT_VIEW
    assert connection.list_actions() == (ControlAction.FREEZE,)
    outcome = connection.send_control(order(ControlAction.FREEZE, "loss"))
    assert (outcome.lines, outcome.is_complete) == (("frozen tree: /data/blackbox/7", "loss"), True)
    with pytest.raises(RejectedError, match="is no coordinator, which alone changes"):
        connection.send_control(order(ControlAction.STOP))


def test_coordinator_gets_the_order_with_its_id(serve):
    coordinator = OwnCoordinator()
    connection = JobConnection(serve(coordinator))
    assert connection.read_status() == MERGED_VIEW
    assert connection.list_actions() == tuple(ControlAction)
    outcome = connection.send_control(order(ControlAction.ITERATIONS, "0|5"))
    (asked,) = coordinator.orders
    assert (asked.id, asked.job_id, asked.action, list(asked.values)) == (
        *("id-1", "train", "iterations"),
        ["0|5"],
    )
    assert outcome.lines == (
        "job train: iterations 0|5 from iteration 9 on, rank 0",
        "rank 1: not changed: it has ended its session",
    )
    assert not outcome.is_complete


def test_daemon_that_is_both_shows_what_both_know(serve):
    coordinator = OwnCoordinator()
    connection = JobConnection(serve(OwnAgent(), coordinator))
    view = connection.read_status()
    assert (len(view.sessions), view.merges) == (4, MERGED_VIEW.merges)
    assert view.black_box == AGENT_VIEW.black_box
    coordinator.view = StatusView()
    assert connection.read_status() == AGENT_VIEW


def test_another_daemon_may_answer_after_it_was_gone(serve, socket_folder):
    connection = JobConnection(serve(OwnAgent()))
    assert connection.read_status() == AGENT_VIEW
    serve(OwnCoordinator())
    with pytest.raises(RejectedError, match="is no agent"):
        connection.read_status()
    assert connection.read_status() == MERGED_VIEW


def test_nobody_at_the_address_is_one_line():
    with pytest.raises(UnavailableError, match=r"^no daemon answers at unix:/nowhere/a\.sock: "):
        JobConnection("unix:/nowhere/a.sock").read_status()


def test_daemon_that_forbids_is_not_taken_for_another(serve):
    agent = OwnAgent()
    agent.is_forbidden = True
    with pytest.raises(ForbiddenError, match="wrong role"):
        JobConnection(serve(agent)).read_status()


def test_address_that_needs_certificates_is_refused_at_once():
    with pytest.raises(ConfigError, match="an address of this host as long as there are no"):
        JobConnection("node17:7421")


def test_role_is_read_from_the_certificate(tmp_path):
    found = {}
    for role in ("operator", "reader", "operators"):
        uri = f"rankdump://role/{role}".encode()
        body = b"\x30\x20" + b"\x86" + bytes([len(uri)]) + uri
        path = tmp_path / f"{role}.pem"
        path.write_text("issuer: x\n" + ssl.DER_cert_to_PEM_cert(body))
        found[role] = has_operator_role(str(path))
    assert found == {"operator": True, "reader": False, "operators": False}
    (tmp_path / "text").write_text("no certificate")
    assert not has_operator_role(str(tmp_path / "text"))
    assert not has_operator_role("/nowhere.pem")
    assert has_operator_role("")
