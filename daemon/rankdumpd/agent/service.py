"""The agent, put together: receive -> admit -> encode -> write -> ledger -> report."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import grpc

from rankdump.contract.errors import DamagedError
from rankdump.contract.room import MetricSample
from rankdump.contract.status import StatusView
from rankdump.wire.channel import Credentials
from rankdump.wire.v1 import agent_pb2_grpc
from rankdumpd import machine
from rankdumpd.agent import receive
from rankdumpd.agent.binhead import MOST_SLOTS
from rankdumpd.agent.budget import Budget
from rankdumpd.agent.committer import Committer, cost_bytes
from rankdumpd.agent.dedup import Originals
from rankdumpd.agent.disk import DiskGauge
from rankdumpd.agent.effects import Effects
from rankdumpd.agent.encode import encode, encode_bin, examine
from rankdumpd.agent.intake import Intake
from rankdumpd.agent.ledger import Ledger
from rankdumpd.agent.mailbox import Mailbox
from rankdumpd.agent.pipeline import Workers
from rankdumpd.agent.registry import Registry
from rankdumpd.agent.report import Reporter
from rankdumpd.agent.rings import Rings
from rankdumpd.agent.servicer import SERVICE_NAME, AgentServicer
from rankdumpd.agent.sessions import Session
from rankdumpd.agent.slabs import Slabs
from rankdumpd.agent.slabs.cap import Cap, share_out
from rankdumpd.agent.slabs.place import folder_for, group_of
from rankdumpd.agent.standing import Standing
from rankdumpd.agent.stream import OpenStreams, Reader
from rankdumpd.agent.values import Outcome, Parcel, Policy, dropped
from rankdumpd.meters import Meters
from rankdumpd.metric_names import AGENT
from rankdumpd.server import socket_path
from rankdumpd.settings import AgentSettings

_JOIN_S = 5.0


def _ask_to_stop() -> None:
    # As an operator would: whatever runs this process ends it in its own order.
    os.kill(os.getpid(), signal.SIGTERM)


class Agent:
    """One agent; it owns its ledger from the moment it is made until `stop`."""

    service_names: tuple[str, ...] = (SERVICE_NAME,)

    def __init__(
        self,
        settings: AgentSettings,
        credentials: Credentials | None = None,
        *,
        meters: Meters | None = None,
    ) -> None:
        self._meters = meters or Meters()
        self._meters.begin(AGENT)
        cap = share_out(
            settings.memory_bytes,
            machine_bytes=machine.memory_bytes(),
            queue_bytes=settings.queue_bytes,
            max_record_bytes=settings.max_record_bytes,
        )
        self._policy = Policy(cap.record_bytes, settings.keep_free_bytes)
        self._budget = Budget(settings.queue_bytes)
        self._streams = OpenStreams()
        # First of all: who may not be here says only that.
        self._ledger = Ledger(
            Path(settings.state_dir),
            report_bytes=settings.report_bytes if settings.coordinator else 0,
        )
        self._ledger.on_damage = _ask_to_stop
        self._slabs = Slabs(
            folder_for(settings.runtime_dir, socket_path(settings.listen)),
            group=group_of(settings.runtime_group),
            ring_bytes=settings.slab_bytes,
            cap=cap,
        )
        self._originals = Originals()

        self._reporter = self._make_reporter(settings.coordinator, credentials)
        self._registry = Registry(
            self._ledger,
            max_record_bytes=cap.record_bytes,
            room=lambda live: cap.session_fault(slab_bytes=self._slabs.held_bytes, sessions=live),
            read_declared=receive.declaration_again,
            meters=self._meters,
        )
        self._standing = self._make_standing(cap, settings.queue_bytes)
        self._effects = Effects(self._ledger, self._reporter, meters=self._meters)
        self._committer = Committer(
            self._ledger, self._registry, self._effects, self._budget, meters=self._meters
        )
        threads = settings.encode_threads or machine.cores()
        self._workers = Workers(threads, self._encode_and_write, self._commit)
        self._rings = Rings(
            self._slabs,
            intake=self._intake,
            live_sessions=self._registry.live,
            changed=self._tell_session,
        )

    def register(self, server: grpc.Server) -> None:
        """Add the agent's service to a server."""
        servicer = AgentServicer(
            self._registry,
            self._streams,
            self._rings,
            reader=self._reader,
            changed=self._tell_session,
            view=self.view,
            settle=self._settle,
            meters=self._meters,
        )
        agent_pb2_grpc.add_AgentServiceServicer_to_server(servicer, server)

    def start(self) -> None:
        """Finish what an earlier process left, then begin to work, last room first.

        DamagedError when the ledger is not to be believed.
        """
        for session in self._registry.recover():
            while not self._effects.apply_due(session):
                pass
            self._tell_session(session)
        self._check_ledger()
        self._reporter.start()
        self._committer.start()
        self._workers.start()
        self._rings.take_up(self._registry.all())
        self._slabs.remove_strays({row.request.session_id for row in self._ledger.unfinished()})
        self._rings.start()

    def drain(self, timeout_s: float) -> int:
        """Let ranks finish their streams, then finish the queue; return what is left.

        DamagedError when the ledger is damaged: nothing can be finished then.
        """
        deadline = time.monotonic() + timeout_s
        self._registry.refuse()
        self._check_ledger()
        # Ranks get half of the time, so that what they have sent can be finished.
        self._streams.drain(timeout_s / 2)
        self._streams.end("the agent is stopping")
        self._rings.look()
        left = self._settle(max(0.0, deadline - time.monotonic()))
        self._rings.look()
        # The coordinator may go before this process does; there is nothing more to tell it.
        self._reporter.stop()
        return left

    def stop(self) -> None:
        """End at once; what was not acknowledged is sent again to the next agent."""
        self._registry.refuse()
        self._budget.close()
        self._streams.end("the agent is stopping")
        self._streams.join(_JOIN_S)
        self._rings.stop()
        self._workers.stop()
        self._committer.stop()
        self._rings.close()
        self._reporter.stop()
        self._ledger.close()

    def view(self) -> StatusView:
        """Return everything people may want to know."""
        return self._standing.view((*self._committer.findings(), *self._reporter.findings()))

    def samples(self) -> list[MetricSample]:
        """Return how it stands, for monitoring."""
        return self._standing.samples(self._reporter)

    def _check_ledger(self) -> None:
        if self._ledger.damage:
            raise DamagedError(self._ledger.damage)

    def _reader(self, session: Session, mailbox: Mailbox) -> Reader:
        return Reader(session, mailbox, intake=self._intake(session), rings=self._rings)

    def _intake(self, session: Session) -> Intake:
        return Intake(
            session,
            budget=self._budget,
            workers=self._workers,
            committer=self._committer,
            policy=self._policy,
            load=lambda: self._standing.load_of((session,)),
        )

    def _encode_and_write(self, parcel: Parcel) -> Outcome:
        outlet = self._registry.get(parcel.ticket.session_id).outlet
        record = examine(parcel, outlet.items, exact=outlet.layout.api is not None)
        if outlet.joiner:
            if parcel.head.key.slot >= MOST_SLOTS:
                return dropped(parcel.ticket, parcel.head, "slot_too_high")
            encoded = encode_bin(parcel, record, outlet.codec, outlet.layout)
            return outlet.writer.write(encoded)
        return self._originals.once(
            record,
            f"{outlet.codec.name} {outlet.tree.kind}",
            link=lambda original: outlet.writer.link(record, original),
            write=lambda: outlet.writer.write(encode(parcel, record, outlet.codec)),
        )

    def _commit(self, outcomes: Sequence[Outcome]) -> None:
        cost = sum(cost_bytes(outcome.head.byte_count) for outcome in outcomes)
        self._committer.submit(outcomes, cost)

    def _settle(self, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        left = self._budget.wait_idle(timeout_s)
        return left + self._reporter.flush(max(0.0, deadline - time.monotonic()))

    def _tell_session(self, session: Session) -> None:
        self._reporter.session(session.status(), str(session.outlet.tree.root))
        for text in self._reporter.warnings(session.request.job_id):
            session.warn(text)

    def _make_reporter(self, address: str, credentials: Credentials | None) -> Reporter:
        return Reporter(
            address,
            self._ledger.log,
            load=lambda: self._standing.load(),
            warn=self._warn,
            tell_again=self._tell_again,
            credentials=credentials,
        )

    def _make_standing(self, cap: Cap, queue_bytes: int) -> Standing:
        return Standing(
            self._registry,
            self._budget,
            self._slabs,
            DiskGauge(),
            policy=self._policy,
            memory_bytes=cap.total_bytes,
            queue_bytes=queue_bytes,
        )

    def _tell_again(self) -> None:
        for session in self._registry.all():
            self._tell_session(session)
            self._ledger.log.tell_again(session.request.session_id)
        self._reporter.wake()

    def _warn(self, job_id: str, text: str) -> None:
        for session in self._registry.all():
            if session.request.job_id == job_id:
                session.warn(text)
