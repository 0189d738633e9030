"""Simulated agent: numbered items, resent from the acknowledged number on."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rankdump._core.events import EventColumns, EventKind, ProcessGroup, RankEvent
from rankdump._core.status import IterationStatus, SessionState, SessionStatus
from rankdump._core.timeouts import RankTimeouts
from rankdump._wire.metadata_messages import events_to_wire
from rankdump._wire.session_messages import timeouts_to_wire
from rankdump._wire.status_messages import iteration_to_wire, session_to_wire
from rankdump.wire.v1 import coordinator_pb2 as pb
from rankdump.wire.v1.coordinator_pb2_grpc import CoordinatorServiceStub

PATIENCE_S = 300.0
MICROSECONDS = 1_700_000_000_000_000


@dataclass(frozen=True)
class ReportedJob:
    """What a simulated job runs: every rank the same operators, and collectives of all."""

    job_id: str
    root: str
    world: int
    operators: int = 6
    collectives: int = 2

    def group(self) -> ProcessGroup:
        return ProcessGroup("world", tuple(range(self.world)))

    def events(self, rank: int, iteration: int) -> EventColumns:
        """Return one iteration of a rank, its positions rising over all of them."""
        size = self.operators + self.collectives
        events: list[RankEvent] = []
        for at in range(size):
            position = iteration * size + at + 1
            start = MICROSECONDS + 1000 * position + 7 * rank
            place = 0, iteration, position, position
            if at < self.operators:
                name = f"Default/layer{at}-Dense/MatMul-op{at}"
                events.append(RankEvent(*place, name, EventKind.OPERATOR, start, start + 400))
            else:
                number = iteration * self.collectives + at - self.operators
                events.append(
                    RankEvent(*place, "AllReduce-op0", EventKind.ALL_REDUCE, start, start + 500,
                          group="world", sequence=number, element_count=8, dtype="float32")
                )  # fmt: skip
        return EventColumns.from_events(events, (self.group(),))

    def session(self, rank: int, state: SessionState = SessionState.OPEN, **more: Any) -> Any:
        name = more.pop("name", f"{self.job_id}-s{rank}")
        host = more.pop("host", "host")
        return SessionStatus(self.job_id, name, rank, self.world, rank, host, 1, state, **more)

    def balance(self, rank: int, iteration: int, name: str = "") -> IterationStatus:
        size = self.operators + self.collectives
        return IterationStatus(
            self.job_id,
            name or f"{self.job_id}-s{rank}",
            rank,
            iteration,
            True,
            expected=3,
            stored=3,
            first_position=iteration * size + 1,
            last_position=(iteration + 1) * size,
        )


class ReportingAgent:
    """Keeps its items as an agent's ledger does; survives any number of coordinators."""

    def __init__(self, agent_id: str, host: str = "host") -> None:
        self.agent_id = agent_id
        self.host = host
        self.items: list[pb.ReportRequest] = []
        self.answer = pb.ReportResponse()
        self.first_answer = pb.ReportResponse()
        self._outbox: queue.Queue[pb.ReportRequest | None] = queue.Queue()
        self._answers: Iterator[pb.ReportResponse] = iter(())

    def session(self, status: SessionStatus, root: str = "") -> None:
        roots = {status.job_id: root} if root else {}
        self._log(sessions=[session_to_wire(status)], roots=roots)

    def events(
        self, job: ReportedJob, rank: int, columns: EventColumns, session_id: str = ""
    ) -> None:
        message = pb.RankEvents(
            job_id=job.job_id,
            rank=rank,
            session_id=session_id or f"{job.job_id}-s{rank}",
            columns=events_to_wire(columns),
        )
        self._log(events=[message])

    def balance(self, status: IterationStatus) -> None:
        self._log(iterations=[iteration_to_wire(status)])

    def timeouts(self, job: ReportedJob, rank: int, timeouts: RankTimeouts) -> None:
        message = pb.RankTimeouts(job_id=job.job_id, rank=rank, timeouts=timeouts_to_wire(timeouts))
        self._log(timeouts=[message])

    def iteration(self, job: ReportedJob, rank: int, iteration: int) -> None:
        """Log all of one iteration of a rank."""
        self.events(job, rank, job.events(rank, iteration))
        self.balance(job.balance(rank, iteration))

    def connect(self, stub: CoordinatorServiceStub) -> None:
        """Begin a stream: greet, then say again what was not acknowledged."""
        self._outbox = queue.Queue()
        self._answers = stub.Report(iter(self._outbox.get, None), timeout=PATIENCE_S)
        self.first_answer = self.exchange()
        self._said = self.first_answer.acknowledged_sequence
        self.send()

    def send(self) -> None:
        """Send what is logged and not yet sent on this stream."""
        for number in range(self._said + 1, len(self.items) + 1):
            message = pb.ReportRequest()
            message.CopyFrom(self.items[number - 1])
            self.exchange(message, sequence=number)
            self._said = number

    def exchange(
        self, message: pb.ReportRequest | None = None, *, sequence: int = 0, **more: Any
    ) -> pb.ReportResponse:
        """Send one message, or a heartbeat; return its answer."""
        sent = pb.ReportRequest(agent_id=self.agent_id, host=self.host, sequence=sequence, **more)
        if message is not None:
            sent.MergeFrom(message)
        self._outbox.put(sent)
        self.answer = next(self._answers)
        return self.answer

    def acknowledged(self) -> bool:
        """Return whether everything is acknowledged."""
        return self.exchange().acknowledged_sequence == len(self.items)

    def close(self) -> None:
        """End the stream."""
        self._outbox.put(None)
        for _ in self._answers:
            pass

    def _log(self, **parts: Any) -> None:
        self.items.append(pb.ReportRequest(**parts))
