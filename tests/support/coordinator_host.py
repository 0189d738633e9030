"""Coordinator in this process, on a Unix socket."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import grpc
from support.reporting_agent import PATIENCE_S, ReportingAgent

from rankdump._core.events import Finding
from rankdump._core.status import OrderEntry, StatusView
from rankdump._wire.status_messages import entry_from_wire, finding_from_wire, view_from_wire
from rankdump.wire.v1 import coordinator_pb2 as pb
from rankdump.wire.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from rankdumpd.coordinator.service.coordinator import JobCoordinator
from rankdumpd.server.grpc_server import GrpcServer
from rankdumpd.settings import CoordinatorSettings


class CoordinatorHost:
    """A coordinator behind a server; its state remains after a stop."""

    def __init__(self, folder: Path, *, ends_with_job: bool = False, **settings: object) -> None:
        self._folder = folder
        chosen = {"state_dir": str(folder / "state"), "deadline_s": 3600.0} | settings
        self.settings = dataclasses.replace(CoordinatorSettings(), **chosen)
        self._ends_with_job = ends_with_job
        self.open()

    def open(self) -> None:
        self.coordinator = JobCoordinator(self.settings, ends_with_job=self._ends_with_job)
        self._server = GrpcServer(f"unix:{self._folder}/c.sock", (self.coordinator,))
        self.coordinator.start()
        self.address = self._server.start()
        self._channel = grpc.insecure_channel(self.address)
        self.stub = CoordinatorServiceStub(self._channel)

    def close(self) -> None:
        self._channel.close()
        self._server.stop(0.0)
        self.coordinator.stop()
        self.coordinator.stop()

    def agent(self, name: str) -> ReportingAgent:
        agent = ReportingAgent(name)
        agent.connect(self.stub)
        return agent

    def status(self, job_id: str = "") -> StatusView:
        request = pb.CoordinatorStatusRequest(job_id=job_id)
        return view_from_wire(self.stub.Status(request, timeout=PATIENCE_S).view)

    def order(self, **request) -> tuple[list[OrderEntry], list[Finding]]:
        pages = list(self.stub.Order(pb.OrderRequest(**request), timeout=PATIENCE_S))
        assert all(len(page.entries) <= 1000 for page in pages)
        entries = [entry_from_wire(entry) for page in pages for entry in page.entries]
        return entries, [finding_from_wire(found) for page in pages for found in page.findings]
