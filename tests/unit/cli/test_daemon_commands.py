"""Commands that call a daemon, with servicers that return fixed responses."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import numpy as np
import pytest

from rankdump._cli.command_group import run_command_line
from rankdump._cli.daemon_client import drain_agent
from rankdump._core.events import EventKind, Finding, FindingKind
from rankdump._core.run_card import ModelSummary, RunCard, format_card
from rankdump._core.status import (
    AgentLoad,
    IterationStatus,
    OrderEntry,
    SessionState,
    SessionStatus,
    StatusView,
)
from rankdump._embedded_daemon import is_daemon_serving
from rankdump._wire.status_messages import entry_to_wire, finding_to_wire, view_to_wire
from rankdump.wire.v1 import (
    agent_pb2,
    agent_pb2_grpc,
    coordinator_pb2,
    coordinator_pb2_grpc,
)

MODEL_OPERATOR = "Default/network-Net/fc-Linear/Linear-op0"
VIEW = StatusView(
    sessions=(SessionStatus("job", "s", 3, 4, 1, "host", 77, SessionState.LOST),),
    iterations=(IterationStatus("job", "s", 3, 0, True, 5, 3, 1, 0, {"disk_low": 1}, 4096, 1024),),
    load=AgentLoad(2, 2048, 1 << 30, 1 << 31),
    roots=("/data/tree",),
    findings=("something odd",),
)
OPERATORS = [
    OrderEntry(
        position=n,
        graph=0,
        iteration=n // 4,
        ranks=(n % 4,),
        name=f"Default/Op-op{n}",
        kind=EventKind.OPERATOR,
        start_us=n * 10,
        end_us=n * 10 + 5,
    )
    for n in range(100)
]
ALL_REDUCE = OrderEntry(
    position=100,
    graph=0,
    iteration=25,
    ranks=(0, 1, 2),
    name="Default/AllReduce",
    kind=EventKind.ALL_REDUCE,
    group="world",
    start_us=1000,
    end_us=2500,
    missing=(3,),
)
ENTRIES = (*OPERATORS, ALL_REDUCE)
FINDINGS = (
    Finding(FindingKind.MISSING_MEMBER, 25, "rank 3 never arrived", ranks=(3,)),
    Finding(FindingKind.SILENT_RANK, 26, "rank 4 is silent", ranks=(4,), provisional=True),
)


class Agent(agent_pb2_grpc.AgentServiceServicer):
    def OpenSession(self, request, context):  # noqa: N802 - the name is the service's
        raise NotImplementedError

    def Push(self, request_iterator, context):  # noqa: N802 - the name is the service's
        raise NotImplementedError

    def Status(self, request, context):  # noqa: N802 - the name is the service's
        return agent_pb2.AgentStatusResponse(view=view_to_wire(VIEW))

    def Control(self, request, context):  # noqa: N802 - the name is the service's
        if request.drain.timeout_ms >= 1000:
            return agent_pb2.ControlResponse(drained=True)
        return agent_pb2.ControlResponse(drained=False, queued_records=7)

    def AnswerOrder(self, request, context):  # noqa: N802 - the name is the service's
        raise NotImplementedError


class Coordinator(coordinator_pb2_grpc.CoordinatorServiceServicer):
    roots: tuple[str, ...] = ("/not/on/this/host",)
    entries = ENTRIES

    def Report(self, request_iterator, context):  # noqa: N802 - the name is the service's
        raise NotImplementedError

    def Status(self, request, context):  # noqa: N802 - the name is the service's
        view = StatusView(roots=self.roots)
        return coordinator_pb2.CoordinatorStatusResponse(view=view_to_wire(view))

    def Hints(self, request, context):  # noqa: N802 - the name is the service's
        raise NotImplementedError

    def Clock(self, request, context):  # noqa: N802 - the name is the service's
        raise NotImplementedError

    def Control(self, request, context):  # noqa: N802 - the name is the service's
        raise NotImplementedError

    def Order(self, request, context):  # noqa: N802 - the name is the service's
        if request.job_id == "clean":
            return
        of_graph = [e for e in self.entries if not request.one_graph or e.graph == request.graph]
        for at in range(0, len(of_graph) * (not request.findings_only), 30):
            page = of_graph[at : at + 30]
            yield coordinator_pb2.OrderResponse(entries=map(entry_to_wire, page))
        for finding in FINDINGS:
            yield coordinator_pb2.OrderResponse(findings=[finding_to_wire(finding)])


@pytest.fixture
def address(socket_folder):
    """A server on a Unix socket that answers as agent and as coordinator."""
    server = grpc.server(ThreadPoolExecutor(2))
    agent_pb2_grpc.add_AgentServiceServicer_to_server(Agent(), server)
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(Coordinator(), server)
    where = f"unix:{socket_folder}/a.sock"
    server.add_insecure_port(where)
    server.start()
    yield where
    server.stop(None).wait()


def test_status_shows_the_view_of_the_agent(address, capsys, monkeypatch):
    """The environment names the agent; table, losses, findings, load and tree are shown."""
    monkeypatch.setenv("RANKDUMP_AGENT", address)
    assert run_command_line(["status"]) == 0
    out = capsys.readouterr().out
    row = "3 lost 1/1 5 3 1 0 1 4.00 KiB 1.00 KiB 4.00x"
    assert " ".join(out.splitlines()[1].split()) == row
    for words in (
        "1 tensor dropped (disk_low): free space on the disk",
        "something odd",
        "2 tensors",
        "/data/tree",
    ):
        assert words in out


def test_status_json_is_the_view(address, capsys):
    """Scripts get the fields of the contract, every drop by its reason."""
    assert run_command_line(["status", "--agent", address, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["iterations"][0]["dropped"] == {"disk_low": 1}
    assert body["sessions"][0]["state"] == "lost"


def test_order_prints_the_pages_of_the_coordinator(address, capsys, monkeypatch):
    """Pages are joined, long listings cut with a word about it, members missing are named."""
    monkeypatch.setenv("RANKDUMP_COORDINATOR", address)
    assert run_command_line(["order"]) == 0
    out = capsys.readouterr().out
    assert "... more lines" in out
    assert out.count("Op-op") == 40
    assert "missing_member: rank 3 never arrived" in out
    assert run_command_line(["order", "--iteration", "25"]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert line.split() == [
        *("100", "25", "0-2", "(missing", "3)", "all_reduce", "AllReduce", "0.000", "1.500")
    ]


def test_order_json_and_findings(address, capsys):
    """Scripts get every line; --findings leaves the lines out and says by its code if any are."""
    assert run_command_line(["order", "--coordinator", address, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert [entry["position"] for entry in body["entries"]] == list(range(101))
    assert body["entries"][-1]["kind"] == "all_reduce"
    assert [finding["kind"] for finding in body["findings"]] == ["missing_member", "silent_rank"]
    assert run_command_line(["order", "--coordinator", address, "--findings"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "missing_member: rank 3 never arrived",
        "silent_rank, so far: rank 4 is silent",
    ]
    assert (
        run_command_line(["order", "--coordinator", address, "--findings", "--iteration", "24"])
        == 0
    )
    capsys.readouterr()
    assert (
        run_command_line(
            ["order", "--coordinator", address, "--findings", "--job", "clean", "--json"]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out) == {"entries": [], "findings": []}


@pytest.mark.parametrize(
    ("options", "count"), [(["--rank", "3"], 26), (["--graph", "0"], 101), (["--graph", "1"], 0)]
)
def test_order_of_one_rank_or_graph(address, capsys, options, count):
    """A collective that misses a rank is shown among the rank's lines, too."""
    assert run_command_line(["order", "--coordinator", address, "--json", *options]) == 0
    assert len(json.loads(capsys.readouterr().out)["entries"]) == count


def test_drain_agent_returns_the_records_left(address):
    """Zero only when everything is in the tree."""
    assert drain_agent(address, timeout_s=2) == 0
    assert drain_agent(address, timeout_s=0.5) == 7


def test_server_without_health_service_is_not_serving(address):
    """Only the health service's word counts."""
    assert not is_daemon_serving(address)


def test_order_names_models_as_they_were_attached(address, capsys, tree, monkeypatch):
    """The run cards of the tree have the names, where this host has its disk."""
    monkeypatch.setattr(
        Coordinator,
        "entries",
        [replace(each, graph=n, name=MODEL_OPERATOR) for n, each in enumerate(OPERATORS[:2])],
    )
    assert run_command_line(["order", "--coordinator", address]) == 0
    assert "Net[1]" in capsys.readouterr().out
    card = RunCard(models=tuple(ModelSummary(name, 1, 6, "0f") for name in ("actor", "critic")))
    tree.tensor(0, 0, MODEL_OPERATOR, np.ones(2, np.float32))
    tree.complete(0, 0, card=json.loads(format_card(card)))
    monkeypatch.setattr(Coordinator, "roots", (str(tree.root),))
    assert run_command_line(["order", "--coordinator", address]) == 0
    out = capsys.readouterr().out
    assert "actor" in out
    assert "critic" in out
