"""All workers of a front: what each knows, and a wish to each, asked for at the same time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import grpc

from rankdump.contract.errors import RankdumpError, UnavailableError
from rankdump.contract.room import MetricSample
from rankdump.contract.status import StatusView
from rankdump.wire import views
from rankdump.wire.channel import Credentials, Options, connect
from rankdump.wire.errors import error_of
from rankdump.wire.v1 import agent_pb2, agent_pb2_grpc, metrics_pb2, metrics_pb2_grpc
from rankdumpd.front.merged import merged
from rankdumpd.required_files import RequiredFiles

STATUS_TIMEOUT_S = 5.0
_MARGIN_S = 2.0
# A status of a thousand ranks is larger than gRPC's usual 4 MiB.
_OPTIONS = (("grpc.max_receive_message_length", 256 << 20),)

Answer_co = TypeVar("Answer_co", covariant=True)
Answer = TypeVar("Answer")


class Member(Protocol):
    """A worker as others see it."""

    @property
    def index(self) -> int:
        """Its number."""
        ...

    @property
    def address(self) -> str:
        """Where it serves; UnavailableError while it does not."""
        ...

    def wait_up(self, timeout_s: float) -> None:
        """Wait until it serves, or no longer."""
        ...

    def findings(self) -> list[str]:
        """Return what people should know of it."""
        ...


class _Call(Protocol[Answer_co]):
    def result(self) -> Answer_co: ...


class Crew:
    """Asks workers; a connection is as short as a call, for a worker may die at any time."""

    def __init__(
        self,
        members: Sequence[Member],
        credentials: Credentials | None = None,
        *,
        own_host: Callable[[], str] = lambda: "",
        required: RequiredFiles | None = None,
    ) -> None:
        """Over TCP with credentials workers show the certificate that the front has: for `own_host`
        rather than for the address they are reached at. `required` are the front's own.
        """
        self._required = required or RequiredFiles()
        self._members, self._credentials, self._own_host = members, credentials, own_host

    def address(self, index: int) -> str:
        """Return where a worker serves; UnavailableError while it does not."""
        return self._members[index].address

    @property
    def serving(self) -> int:
        """How many serve at present."""
        return sum(map(_serves, self._members))

    def view(self) -> StatusView:
        """Return what all of them know, and who did not say."""
        answers = self._ask(
            lambda channel: agent_pb2_grpc.AgentServiceStub(channel).Status.future(
                agent_pb2.AgentStatusRequest(), timeout=STATUS_TIMEOUT_S
            )
        )
        silent = [
            f"worker {member.index} is left out, it does not answer: {answer}"
            for member, answer in zip(self._members, answers, strict=True)
            if isinstance(answer, RankdumpError)
        ]
        own = [sentence for member in self._members for sentence in member.findings()]
        known = [views.view_from_wire(a.view) for a in answers if not isinstance(a, RankdumpError)]
        return merged(known, [*self._required.gone, *own, *silent])

    def metrics(self) -> dict[int, list[MetricSample]]:
        """Return the numbers of those that answer."""
        answers = self._ask(
            lambda channel: metrics_pb2_grpc.MetricsServiceStub(channel).Metrics.future(
                metrics_pb2.MetricsRequest(), timeout=STATUS_TIMEOUT_S
            )
        )
        return {
            member.index: views.samples_from_wire(answer)
            for member, answer in zip(self._members, answers, strict=True)
            if not isinstance(answer, RankdumpError)
        }

    def settle(self, timeout_s: float) -> int:
        """Wait until all that was received is in the tree; return what is not, at least one for
        each worker that does not say.
        """
        deadline_s = time.monotonic() + timeout_s
        for member in self._members:
            member.wait_up(deadline_s - time.monotonic())
        left_s = max(0.0, deadline_s - time.monotonic())
        drain = agent_pb2.Drain(timeout_ms=round(left_s * 1000))
        answers = self._ask(
            lambda channel: agent_pb2_grpc.AgentServiceStub(channel).Control.future(
                agent_pb2.ControlRequest(drain=drain), timeout=left_s + _MARGIN_S
            )
        )
        return sum(1 if isinstance(a, RankdumpError) else a.queued_records for a in answers)

    def pin(self, pin: agent_pb2.Pin) -> None:
        """Pin a job with all workers, or let it go; raise what any of them says against it."""
        request = agent_pb2.ControlRequest(pin=pin)
        answers = self._ask(
            lambda channel: agent_pb2_grpc.AgentServiceStub(channel).Control.future(
                request, timeout=STATUS_TIMEOUT_S
            )
        )
        for answer in answers:
            if isinstance(answer, RankdumpError):
                raise answer

    def _options(self) -> Options:
        host = self._own_host()
        return (*_OPTIONS, ("grpc.ssl_target_name_override", host)) if host else _OPTIONS

    def _ask(self, call: Callable[[grpc.Channel], _Call[Answer]]) -> list[Answer | RankdumpError]:
        """Return the answer of each, or why there is none."""
        with contextlib.ExitStack() as channels:
            calls: list[_Call[Answer] | RankdumpError] = []
            for member in self._members:
                try:
                    channel = connect(member.address, self._credentials, self._options())
                except RankdumpError as error:
                    calls.append(error)
                    continue
                channels.enter_context(channel)
                calls.append(call(channel))
            return [_answer(each) for each in calls]


def _serves(member: Member) -> bool:
    try:
        return bool(member.address)
    except UnavailableError:
        return False


def _answer(call: _Call[Answer] | RankdumpError) -> Answer | RankdumpError:
    if isinstance(call, RankdumpError):
        return call
    try:
        return call.result()
    except grpc.RpcError as failure:
        return error_of(failure)
