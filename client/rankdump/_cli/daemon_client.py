"""Calls from commands to an agent or a coordinator. Each call has a function, which converts
messages to values and failures to errors. Imports gRPC, so commands that also work without a daemon
import this module on use.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from rankdump._cli.options import load_credentials
from rankdump._core.events import Finding
from rankdump._core.status import OrderEntry, StatusView
from rankdump._core.timeouts import TimeoutHint
from rankdump._wire import status_messages
from rankdump._wire.channel import explain_failure, open_channel
from rankdump.errors import RejectedError, UnavailableError, UnsupportedError
from rankdump.wire.v1 import agent_pb2, agent_pb2_grpc, coordinator_pb2, coordinator_pb2_grpc

# The status of a thousand ranks is larger than gRPC's default limit of 4 MiB.
_CHANNEL_OPTIONS = (("grpc.max_receive_message_length", 256 << 20),)


def fetch_agent_status(address: str, *, timeout_s: float = 10.0) -> StatusView:
    """Return the status of the agent."""
    with _open_channel(address, "agent") as channel:
        stub = agent_pb2_grpc.AgentServiceStub(channel)
        response = stub.Status(agent_pb2.AgentStatusRequest(), timeout=timeout_s)
        return status_messages.view_from_wire(response.view)


def fetch_job_status(address: str, *, job_id: str = "", timeout_s: float = 10.0) -> StatusView:
    """Return the coordinator's status of a job; without an id, of all jobs."""
    request = coordinator_pb2.CoordinatorStatusRequest(job_id=job_id)
    with _open_channel(address, "coordinator") as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        return status_messages.view_from_wire(stub.Status(request, timeout=timeout_s).view)


def drain_agent(address: str, *, timeout_s: float) -> int:
    """Wait until everything that the agent has received is in the tree; return the number of
    records that are not.
    """
    request = agent_pb2.ControlRequest(drain=agent_pb2.Drain(timeout_ms=int(timeout_s * 1000)))
    with _open_channel(address, "agent") as channel:
        response = agent_pb2_grpc.AgentServiceStub(channel).Control(request, timeout=timeout_s + 5)
        return 0 if response.drained else max(1, response.queued_records)


def set_job_pin(address: str, job_id: str, *, pinned: bool) -> None:
    """Pin a job on the agent, or unpin it."""
    request = agent_pb2.ControlRequest(pin=agent_pb2.Pin(job_id=job_id, pinned=pinned))
    with _open_channel(address, "agent") as channel:
        agent_pb2_grpc.AgentServiceStub(channel).Control(request, timeout=10.0)


@dataclass(frozen=True, slots=True)
class FrozenTrees:
    """Answer of an agent that has frozen the black box of a job."""

    trees: tuple[str, ...]
    notes: tuple[str, ...]


def freeze_job(address: str, job_id: str, reason: str, *, timeout_s: float = 180.0) -> FrozenTrees:
    """Freeze the black box of a job and wait for its tree; without an id, of the only job."""
    freeze = agent_pb2.Freeze(job_id=job_id, text=reason)
    with _open_channel(address, "agent") as channel:
        stub = agent_pb2_grpc.AgentServiceStub(channel)
        answer = stub.Control(agent_pb2.ControlRequest(freeze=freeze), timeout=timeout_s)
        return FrozenTrees(tuple(answer.trees), tuple(answer.notes))


def fetch_order(address: str, *, job_id: str, graph: int | None) -> Iterator[OrderEntry]:
    """Yield the merged order of a job; without an id, of the job that published last."""
    request = coordinator_pb2.OrderRequest(
        job_id=job_id, graph=graph or 0, one_graph=graph is not None
    )
    for page in _fetch_order_pages(address, request, timeout_s=600.0):
        yield from map(status_messages.entry_from_wire, page.entries)


def fetch_order_findings(
    address: str, *, job_id: str = "", timeout_s: float = 60.0
) -> tuple[Finding, ...]:
    """Return the findings of the merge in the order of a job."""
    request = coordinator_pb2.OrderRequest(job_id=job_id, findings_only=True)
    pages = _fetch_order_pages(address, request, timeout_s)
    return tuple(
        status_messages.finding_from_wire(found) for page in pages for found in page.findings
    )


def _fetch_order_pages(
    address: str, request: coordinator_pb2.OrderRequest, timeout_s: float
) -> Iterator[coordinator_pb2.OrderResponse]:
    with _open_channel(address, "coordinator") as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        yield from stub.Order(request, timeout=timeout_s)


def fetch_timeout_hints(
    address: str, *, job_id: str = "", timeout_s: float = 10.0
) -> tuple[TimeoutHint, ...]:
    """Return the timeout hints of the groups of a job; without an id, of all jobs."""
    request = coordinator_pb2.HintsRequest(job_id=job_id)
    with _open_channel(address, "coordinator") as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        response = stub.Hints(request, timeout=timeout_s)
        return tuple(map(status_messages.timeout_hint_from_wire, response.hints))


@contextmanager
def _open_channel(address: str, who: str) -> Generator[grpc.Channel, None, None]:
    own = load_credentials()
    with open_channel(address, own, _CHANNEL_OPTIONS) as channel:
        try:
            yield channel
        except grpc.RpcError as failure:
            error = explain_failure(failure, address, own)
            if isinstance(error, UnavailableError):
                raise UnavailableError(f"no {who} answers at {address}: {error}") from None
            if isinstance(error, UnsupportedError):
                raise RejectedError(
                    f"the daemon at {address} is no {who}, or one of an earlier release: {error}"
                ) from None
            raise type(error)(f"{who} at {address}: {error}") from None
