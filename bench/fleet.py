"""Simulated agents of a job: event columns of ranks that run one program, over real streams."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import grpc
import numpy as np

from rankdump._core.events import (
    EVENT_COLUMN_TYPES,
    EventColumn,
    EventColumns,
    EventKind,
    ProcessGroup,
)
from rankdump._wire.metadata_messages import events_to_wire
from rankdump.wire.v1 import coordinator_pb2, coordinator_pb2_grpc, status_pb2

OPERATORS = 10_000
CALLS = 200
RANKS_PER_AGENT = 8
EVENTS = OPERATORS + CALLS
"""Events of one rank and iteration."""
JOB = "bench"
_STEP_US = 1_000_000
_EVENT_US = 90
_WORLD_EVERY = 10
_MOST_UNANSWERED = 8
_PATIENCE_S = 600.0
_GREETING = 0


class Program:
    """Program of every rank: a call after each fifty operators; of ten calls one is of the world,
    the others by turns of eight neighbours and of those with the same place among theirs."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        at = np.arange(1, CALLS + 1) * (EVENTS // CALLS) - 1
        self._call_rows = at
        self._is_call = np.zeros(EVENTS, dtype=bool)
        self._is_call[at] = True
        places = np.arange(CALLS)
        self._group_of_call = np.where(places % _WORLD_EVERY == 0, 0, 1 + places % 2)
        self._names = [self._operator(number) for number in range(OPERATORS)]

    def texts(self) -> list[str]:
        """Return the texts sent once a stream: names of operators and of types."""
        return ["", "float32", *self._names]

    def groups(self, rank: int) -> tuple[ProcessGroup, ...]:
        """Return the groups of a rank."""
        first = rank // RANKS_PER_AGENT * RANKS_PER_AGENT
        place = rank % RANKS_PER_AGENT
        return (
            ProcessGroup("world", tuple(range(self.world_size))),
            ProcessGroup(f"tensor-{first}", tuple(range(first, first + RANKS_PER_AGENT))),
            ProcessGroup(f"data-{place}", tuple(range(place, self.world_size, RANKS_PER_AGENT))),
        )

    def columns(self, rank: int, iteration: int, *, groups_at: int, calls_at: int) -> EventColumns:
        """Return an iteration of a rank; its groups' names and its calls' are texts from there."""
        rows, calls = np.arange(EVENTS), self._call_rows
        position = iteration * EVENTS + rows + 1
        start_us = iteration * _STEP_US + rows * _EVENT_US + (rank * 7919) % 31
        columns: dict[str, EventColumn] = {
            field: np.zeros(EVENTS, code) for field, code in EVENT_COLUMN_TYPES.items()
        }
        columns["iteration"][:] = iteration
        columns["position"][:] = columns["end_position"][:] = position
        columns["start_us"][:], columns["end_us"][:] = start_us, start_us + _EVENT_US // 2
        # A collective is left by all at once.
        columns["end_us"][calls] = iteration * _STEP_US + calls * _EVENT_US + 60
        columns["kind"][:] = int(EventKind.OPERATOR)
        columns["kind"][calls] = int(EventKind.ALL_REDUCE)
        columns["name"][~self._is_call] = np.arange(OPERATORS) + 2
        columns["name"][calls] = calls_at + np.arange(CALLS)
        columns["peer"][:] = -1
        columns["group"][calls] = groups_at + self._group_of_call
        for group in range(3):
            own = calls[self._group_of_call == group]
            columns["sequence"][own] = iteration * len(own) + np.arange(len(own))
        columns["element_count"][calls] = 1 << 20
        columns["dtype"][calls] = 1
        return EventColumns((), (), columns)

    def call_names(self, iteration: int) -> list[str]:
        """Return the names of an iteration's calls, which no other iteration has."""
        first = iteration * CALLS
        return [f"Default/group/AllReduce-op{first + number}" for number in range(CALLS)]

    @staticmethod
    def _operator(number: int) -> str:
        block, place = divmod(number, 100)
        return f"Default/network-Model/layers-ModuleList/{block}-Block/part-Linear/Linear-op{place}"


class Agent:
    """One agent with its ranks, which reports an iteration on request."""

    def __init__(self, address: str, index: int, program: Program, root: str) -> None:
        self._program, self._index, self._root = program, index, root
        first = index * RANKS_PER_AGENT
        self._ranks = range(first, min(first + RANKS_PER_AGENT, program.world_size))
        self._texts = 0
        self._requests: queue.SimpleQueue[coordinator_pb2.ReportRequest | None]
        self._requests = queue.SimpleQueue()
        self._unanswered = threading.Semaphore(_MOST_UNANSWERED)
        self._answered = threading.Condition()
        self._sequence = self._received = 0
        self._failure = ""
        self._channel = grpc.insecure_channel(address)
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(self._channel)
        self._answers = stub.Report(iter(self._requests.get, None))
        self._thread = threading.Thread(target=self._listen, args=(self._answers,), daemon=True)
        self._thread.start()
        self._send(coordinator_pb2.ReportRequest(host=f"host{index}"), items=_GREETING)
        self._introduce()

    def say(self, iteration: int) -> None:
        """Report an iteration of every rank of this agent."""
        program, names = self._program, self._program.call_names(iteration)
        calls_at = self._texts
        for rank in self._ranks:
            groups_at = self._groups_at + 3 * (rank - self._ranks[0])
            columns = program.columns(rank, iteration, groups_at=groups_at, calls_at=calls_at)
            report = coordinator_pb2.ReportRequest(texts=self._said(names))
            names = []
            wire = events_to_wire(columns, names=False)
            report.events.add(job_id=JOB, rank=rank, columns=wire, session_id=f"s{rank}")
            report.iterations.add(
                job_id=JOB,
                session_id=f"s{rank}",
                rank=rank,
                iteration=iteration,
                complete=True,
                first_position=iteration * EVENTS + 1,
                last_position=(iteration + 1) * EVENTS,
            )
            self._send(report, items=2)

    def wait_received(self) -> None:
        """Return when the coordinator has received all reports."""
        with self._answered:
            done = self._answered.wait_for(
                lambda: self._failure or self._received >= self._sequence, _PATIENCE_S
            )
        if self._failure or not done:
            raise RuntimeError(f"agent {self._index}: {self._failure or 'no answer'}")

    def close(self) -> None:
        """End the stream."""
        self._requests.put(None)
        self._thread.join(_PATIENCE_S)
        self._channel.close()

    def _introduce(self) -> None:
        report = coordinator_pb2.ReportRequest(texts=self._said(self._program.texts()))
        self._groups_at = self._texts
        groups = [group for rank in self._ranks for group in self._program.groups(rank)]
        more = self._said([group.name for group in groups])
        report.texts.texts.extend(more.texts)
        for rank in self._ranks:
            report.sessions.add(
                job_id=JOB,
                session_id=f"s{rank}",
                rank=rank,
                world_size=self._program.world_size,
                host=f"host{self._index}",
                state=status_pb2.SESSION_STATE_OPEN,
                selected="all",
            )
            declared = EventColumns(
                (),
                self._program.groups(rank),
                {f: np.empty(0, c) for f, c in EVENT_COLUMN_TYPES.items()},
            )
            wire = events_to_wire(declared, names=False)
            report.events.add(job_id=JOB, rank=rank, columns=wire, session_id=f"s{rank}")
        report.roots[JOB] = self._root
        self._send(report, items=2 * len(self._ranks))

    def _said(self, texts: list[str]) -> coordinator_pb2.Texts:
        first, self._texts = self._texts, self._texts + len(texts)
        return coordinator_pb2.Texts(first=first, texts=texts)

    def _send(self, report: coordinator_pb2.ReportRequest, *, items: int) -> None:
        self._unanswered.acquire()
        report.agent_id = f"agent{self._index}"
        self._sequence += items
        report.sequence = self._sequence if items else 0
        self._requests.put(report)

    def _listen(self, answers: Iterator[coordinator_pb2.ReportResponse]) -> None:
        try:
            for answer in answers:
                self._unanswered.release()
                with self._answered:
                    self._received = answer.received_sequence
                    self._answered.notify_all()
        except grpc.RpcError as failure:
            with self._answered:
                self._failure = str(failure)
                self._answered.notify_all()
