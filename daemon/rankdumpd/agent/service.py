"""The agent, put together: receive -> admit -> encode -> write -> ledger -> report."""

from __future__ import annotations

import dataclasses
import logging
import time
from pathlib import Path

import grpc

from rankdump.contract import roots
from rankdump.contract.room import MetricSample
from rankdump.contract.status import StatusView
from rankdump.wire.channel import Credentials
from rankdump.wire.v1 import agent_pb2_grpc
from rankdumpd import machine
from rankdumpd.activation import own_socket
from rankdumpd.agent import receive
from rankdumpd.agent.budget import Budget
from rankdumpd.agent.committer import Committer
from rankdumpd.agent.dedup import Originals
from rankdumpd.agent.effects import Effects
from rankdumpd.agent.filing import filed
from rankdumpd.agent.final_balance import NOTE, FinalBalance
from rankdumpd.agent.intake import Intake
from rankdumpd.agent.ledger import Ledger
from rankdumpd.agent.ledger_room import LedgerRoom
from rankdumpd.agent.limits import Limits, policy_of
from rankdumpd.agent.mailbox import Mailbox
from rankdumpd.agent.openings import Openings
from rankdumpd.agent.overview import Overview
from rankdumpd.agent.pipeline import Workers
from rankdumpd.agent.recovery import take_up
from rankdumpd.agent.registry import Registry
from rankdumpd.agent.report import Reporter
from rankdumpd.agent.retain import Keeper, Told, nobody
from rankdumpd.agent.rings import Rings
from rankdumpd.agent.servicer import SERVICE_NAME, AgentServicer
from rankdumpd.agent.sessions import Session
from rankdumpd.agent.slabs import Slabs
from rankdumpd.agent.slabs.cap import share_out
from rankdumpd.agent.slabs.place import folder_for, group_of
from rankdumpd.agent.stream import OpenStreams, Reader
from rankdumpd.agent.telling import Telling
from rankdumpd.agent.tries import Tries
from rankdumpd.agent.usage import Usage
from rankdumpd.agent.values import Outcome, Parcel
from rankdumpd.lifecycle import Room
from rankdumpd.meters import Meters
from rankdumpd.metric_names import AGENT
from rankdumpd.required_files import RequiredFiles
from rankdumpd.server import socket_path
from rankdumpd.settings import AgentSettings, Settings
from rankdumpd.signals import ask_to_stop

LOST = "the next process will not know what this one has acknowledged"
"""What it costs when a state file is taken away."""
_STOP_S = 3.0
"""What ends within it ends in order; a thread that a disk holds up is left to it."""

_log = logging.getLogger(__name__)


class Agent(Room):
    """One agent; it owns its ledger from the moment it is made until `stop`."""

    service_names: tuple[str, ...] = (SERVICE_NAME,)

    def __init__(
        self,
        settings: AgentSettings,
        credentials: Credentials | None = None,
        *,
        told: Told = nobody,
        meters: Meters | None = None,
        required: RequiredFiles | None = None,
    ) -> None:
        """`told` hears what is removed from trees, `required` where the ledger stands."""
        self._meters = meters or Meters()
        self._meters.begin(AGENT)
        cap = share_out(
            settings.memory_bytes,
            machine_bytes=machine.memory_bytes(),
            queue_bytes=settings.queue_bytes,
            max_record_bytes=settings.max_record_bytes,
        )
        self._listen, self._state_dir = settings.listen, settings.state_dir
        self._tries, self._streams = Tries(), OpenStreams()
        self._budget, self._usage = Budget(settings.queue_bytes), Usage()
        # First of all: who may not be here says only that.
        self._ledger = Ledger(
            Path(settings.state_dir),
            report_bytes=settings.report_bytes if settings.coordinator else 0,
        )
        self._ledger.on_damage = ask_to_stop
        self._required = required or RequiredFiles()
        self._required.keep(self._ledger.path, LOST)
        self._slabs = Slabs(
            folder_for(settings.runtime_dir, socket_path(settings.listen)),
            group=group_of(settings.runtime_group),
            ring_bytes=settings.slab_bytes,
            cap=cap,
        )
        self._limits = Limits(
            policy_of(settings, cap.record_bytes), cap, self._budget, self._usage, self._slabs
        )
        self._originals = Originals()
        self._reporter = self._make_reporter(settings.coordinator, credentials)
        self._registry = Registry(
            self._ledger,
            max_record_bytes=cap.record_bytes,
            room=lambda live: cap.session_fault(slab_bytes=self._slabs.held_bytes, sessions=live),
            read_declared=receive.declaration_again,
            max_sessions=settings.max_sessions,
            roots=roots.folders(settings.roots),
            meters=self._meters,
        )
        self._furnish(settings, told)

    def _furnish(self, settings: AgentSettings, told: Told) -> None:
        """Make the rooms behind the registry."""
        self._telling = Telling(self._registry, self._ledger, self._reporter, self._limits.warnings)
        self._overview = Overview(
            self._registry,
            self._limits,
            pins=lambda: self._ledger.retention.pins,
            slab_bytes=lambda: self._slabs.held_bytes,
            ledger=LedgerRoom(Path(settings.state_dir)),
            events=self._reporter.events,
        )
        self._openings = Openings(self._registry.open, self._take_left)
        self._effects = Effects(
            self._ledger, self._reporter, meters=self._meters, usage=self._usage
        )
        self._committer = Committer(
            *(self._ledger, self._registry, self._effects, self._budget),
            meters=self._meters,
            usage=self._usage,
        )
        self._keeper = Keeper(
            *(self._ledger, self._registry, self._usage),
            lambda: self._limits.policy,
            told=told,
            meters=self._meters,
        )
        threads = settings.encode_threads or machine.cores()
        self._workers = Workers(threads, self._file, self._committer.take)
        self._rings = Rings(
            self._slabs,
            intake=self._intake,
            live_sessions=self._registry.live,
            changed=self._telling.tell,
        )

    def register(self, server: grpc.Server) -> None:
        """Add the agent's service to a server."""
        servicer = AgentServicer(
            self._registry,
            self._streams,
            self._rings,
            self._openings,
            reader=self._reader,
            changed=self._telling.tell,
            view=self.view,
            settle=self._settle,
            pin=self._ledger.retention.pin,
            redirect=lambda peer: own_socket(self._listen, peer),
            meters=self._meters,
        )
        agent_pb2_grpc.add_AgentServiceServicer_to_server(servicer, server)

    def start(self) -> None:
        """Finish what an earlier process left, then begin to work, last room first.

        DamagedError when the ledger is not to be believed.
        """
        retention = self._ledger.retention
        self._usage.restore(retention.taken(), retention.counts())
        take_up(self._registry, self._effects, self._telling.tell)
        self._ledger.check()
        self._reporter.start()
        self._committer.start()
        self._workers.start()
        self._rings.take_up(self._registry.all())
        self._slabs.remove_strays(set(self._ledger.unfinished()))
        self._rings.start()
        self._keeper.start()

    def drain(self, timeout_s: float) -> int:
        """Let ranks finish their streams, then finish the queue; return the frames that are left.

        DamagedError when the ledger is damaged: nothing can be finished then.
        """
        deadline = time.monotonic() + timeout_s
        self._registry.refuse()
        self._ledger.check()
        # Ranks get half of the time, so that what they have sent can be finished.
        self._streams.drain(timeout_s / 2)
        self._streams.end("the agent is stopping")
        self._rings.look()
        left = self._budget.wait_idle(max(0.0, deadline - time.monotonic()))
        # What is not told stays in the ledger: nothing of it is unfinished here.
        self._reporter.flush(max(0.0, deadline - time.monotonic()))
        self._rings.look()
        self._reporter.leave(self._state_dir)
        # The coordinator may go before this process does; there is nothing more to tell it.
        self._reporter.stop()
        return left

    def stop(self) -> None:
        """End at once; what was not acknowledged is sent again to the next agent."""
        deadline = time.monotonic() + _STOP_S
        self._registry.refuse()
        self._budget.close()
        self._streams.end("the agent is stopping")
        self._streams.join(_STOP_S / 2)
        self._rings.stop()
        written = self._workers.stop(max(0.0, deadline - time.monotonic()))
        committed = self._committer.stop(max(_STOP_S / 2, deadline - time.monotonic()))
        kept = self._keeper.stop(_STOP_S / 2)
        self._reporter.stop()
        # A commit that goes on holds the ledger, and what stands in slabs is being written.
        if written and committed and kept:
            for room in (self._rings, self._registry, self._ledger):
                room.close()
        else:
            _log.error("a disk holds up a thread: ledger and slabs are left as they are")

    def reload(self, settings: Settings) -> None:
        """Take over limits; they hold from the next tensor on."""
        largest = self._limits.policy.max_record_bytes
        self._limits.policy = policy_of(settings.agent, largest)

    def fault(self) -> str:
        """Say which thread is dead without which nothing is written or told."""
        parts = (self._workers, self._committer, self._rings, self._reporter)
        return "; ".join(filter(None, (part.fault() for part in parts)))

    def brief(self) -> str:
        """Say who is here and what is under way."""
        under_way = f"{self._budget.items} frames of {self._budget.used_bytes:,} bytes under way"
        return f"{self._registry.live()} ranks, {under_way}"

    def view(self) -> StatusView:
        """Return everything people may want to know."""
        rooms = (self._registry, self._openings, self._keeper, self._committer, self._reporter)
        said = [sentence for room in rooms for sentence in room.findings()]
        view = self._overview.view((*self._required.gone, *said))
        sessions, iterations = self._openings.statuses()
        return dataclasses.replace(
            view, sessions=view.sessions + sessions, iterations=view.iterations + iterations
        )

    def samples(self) -> list[MetricSample]:
        """Return how it stands, for monitoring."""
        return self._overview.samples()

    def _reader(self, session: Session, mailbox: Mailbox) -> Reader:
        return Reader(session, mailbox, intake=self._intake(session), rings=self._rings)

    def _intake(self, session: Session) -> Intake:
        return Intake(
            session,
            budget=self._budget,
            workers=self._workers,
            committer=self._committer,
            room=lambda: self._limits.room_of(session),
            tries=self._tries,
        )

    def _take_left(self, session_id: str, left: FinalBalance) -> None:
        session = self._registry.get(session_id)
        intake = self._intake(session)
        for frame in left.frames:
            intake.take(frame)
        intake.hand_on()
        session.trouble(f"rank {session.request.rank}: {NOTE}")
        session.lose()
        self._telling.tell(session)

    def _file(self, parcel: Parcel) -> Outcome:
        return filed(parcel, self._registry.get(parcel.ticket.session_id).outlet, self._originals)

    def _settle(self, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        left = self._budget.wait_idle(timeout_s)
        return left + self._reporter.flush(max(0.0, deadline - time.monotonic()))

    def _make_reporter(self, address: str, credentials: Credentials | None) -> Reporter:
        return Reporter(
            address,
            self._ledger.log,
            load=lambda: self._limits.load_of(self._registry.all()),
            warn=lambda job_id, text: self._telling.warn(job_id, text),
            tell_again=lambda: self._telling.tell_again(),
            quiet=lambda: filter(None, [each.quiet_at for each in self._registry.all()]),
            credentials=credentials,
        )
