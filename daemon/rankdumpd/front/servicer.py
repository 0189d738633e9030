"""The front on the wire: ranks are sent on to their workers, people get the view of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import grpc

from rankdump.contract.errors import ProtocolError, RefusedError
from rankdump.contract.exchange import SessionGrant, SessionRequest
from rankdump.wire import convert, views
from rankdump.wire.v1 import agent_pb2, agent_pb2_grpc
from rankdumpd.agent.servicer import answered, drain_s
from rankdumpd.front.crew import Crew
from rankdumpd.meters import Meters


class FrontServicer(agent_pb2_grpc.AgentServiceServicer):
    """Answers as an agent does, and takes no frames itself."""

    def __init__(
        self, crew: Crew, *, redirect: Callable[[SessionRequest], str], meters: Meters
    ) -> None:
        self._crew, self._redirect, self._meters = crew, redirect, meters

    def OpenSession(  # noqa: N802 - the name is the generated base class's
        self, request: agent_pb2.OpenSessionRequest, context: grpc.ServicerContext
    ) -> agent_pb2.OpenSessionResponse:
        """Send a rank on to its worker."""
        with answered(context, self._meters):
            redirect = self._redirect(convert.session_request_from_wire(request))
            grant = SessionGrant(b"", 0, 0, redirect=redirect)
            return convert.session_grant_to_wire(grant)

    def Push(  # noqa: N802 - the name is the generated base class's
        self, request_iterator: Iterator[agent_pb2.PushRequest], context: grpc.ServicerContext
    ) -> Iterator[agent_pb2.PushResponse]:
        """Refuse a rank that did not go where it was sent."""
        with answered(context, self._meters):
            raise RefusedError(
                "this agent has several workers, and this client follows no redirect: it is older "
                "than the agent"
            )
        return iter(())

    def Status(  # noqa: N802 - the name is the generated base class's
        self, request: agent_pb2.AgentStatusRequest, context: grpc.ServicerContext
    ) -> agent_pb2.AgentStatusResponse:
        """Say how everything stands with all workers."""
        return agent_pb2.AgentStatusResponse(view=views.view_to_wire(self._crew.view()))

    def Control(  # noqa: N802 - the name is the generated base class's
        self, request: agent_pb2.ControlRequest, context: grpc.ServicerContext
    ) -> agent_pb2.ControlResponse:
        """Pass a drain or a pin on to all workers."""
        with answered(context, self._meters):
            if request.HasField("pin"):
                self._crew.pin(request.pin)
                return agent_pb2.ControlResponse()
            if not request.HasField("drain"):
                raise ProtocolError("control without an action")
            left = self._crew.settle(drain_s(request.drain))
            return agent_pb2.ControlResponse(drained=left == 0, queued_records=left)
