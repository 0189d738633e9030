"""One rank of an endless job, which records its actions.

python -m faults.rank JSON, where JSON is a `RankConfiguration`; SIGUSR1 ends it well.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from faults.control_page import ControlPage
from faults.fault_layer import FaultLayer
from faults.rank_journal import NOT_CLOSED, RankJournal
from faults.tensor_content import OP_TYPE, names, op_name, tensor

import rankdump
from rankdump._shm.slab_format import ENTRY_HEAD, RING_OFFSET
from rankdump._transport.agent_client import AgentClient
from rankdump._transport.push_stream import PushStream
from rankdump._transport.send_buffer import SendBuffer
from rankdump.wire.v1 import agent_pb2

Publish: TypeAlias = Callable[..., None]
Requests: TypeAlias = Callable[[PushStream, int], Iterator[Any]]


@dataclass(frozen=True, slots=True)
class RankConfiguration:
    """Configuration of one rank."""

    rank: int
    life: int
    journal: str
    control: str
    root: str
    pause_s: float
    environ: dict[str, str] | None = None
    iterations: int = 0
    """How many; 0 means until it is told to stop."""


class ClientWitness:
    """Wrappers of the client's objects that write the journal; for one session a process."""

    def __init__(self, journal: RankJournal, control: ControlPage) -> None:
        self.session_id = ""
        self.left: dict[str, Any] = NOT_CLOSED
        """What the session kept when it was closed, and the state in which it waited no longer."""
        self._journal = journal
        self._wrap_client()
        self._wrap_buffer()
        flipper = BitFlipper(control)
        _put(SendBuffer, "publish", flipper.publish(SendBuffer.publish))
        _put(PushStream, "requests", flipper.requests(PushStream.requests))

    def _wrap_client(self) -> None:
        begin, close, witnessed = AgentClient.__init__, AgentClient.close, self

        def begun(client: AgentClient, request: Any, *args: Any, **fields: Any) -> None:
            witnessed.session_id = request.session_id
            begin(client, request, *args, **fields)

        def closed(client: AgentClient, patience_s: float) -> int:
            lost, items = close(client, patience_s), client._buffer.items
            witnessed.left = {
                "tensors": lost + client.left_in_slab,
                "outstanding": items.outstanding,
                "in_slab": client.left_in_slab,
                "link": client.link.value,
                "idle_s": round(client._buffer.idle_s(), 3),
            }
            return lost

        _put(AgentClient, "__init__", begun)
        _put(AgentClient, "close", closed)

    def _wrap_buffer(self) -> None:
        acknowledge, journal = SendBuffer.acknowledge, self._journal

        def acknowledged(buffer: SendBuffer, sequence: int) -> None:
            acknowledge(buffer, sequence)
            journal.acknowledged(buffer.items.acknowledged)

        _put(SendBuffer, "acknowledge", acknowledged)


def _put(owner: type, name: str, method: Callable[..., Any]) -> None:
    setattr(owner, name, method)


class BitFlipper:
    """Flips bits of unannounced slab entries where the control page requests it.

    In the data, frame or head of a record; heads of declarations count as well.
    """

    def __init__(self, control: ControlPage, body: str = "") -> None:
        """Flip in entries of one kind of frame alone, where it is named."""
        self._control, self._body = control, body
        self._published: list[tuple[Any, Any]] = []

    def publish(self, publish: Publish) -> Publish:
        """Return what publishes an entry as before, and remembers where it stands."""

        def published(buffer: SendBuffer, ring: Any, room: Any, *, whole: bool) -> None:
            if self._control.flips and whole and self._is_wanted(room):
                self._published.append((ring, room))
            publish(buffer, ring, room, whole=whole)

        return published

    def requests(self, requests: Requests) -> Requests:
        """Return what rings for entries as before: the sender has sealed them by then."""

        def rung(outgoing: PushStream, stream: int) -> Iterator[Any]:
            told = 0
            for request in requests(outgoing, stream):
                if self._published and request.HasField("doorbell"):
                    self._flip(told, request.doorbell.written)
                told = request.doorbell.written
                yield request

        return rung

    def _is_wanted(self, room: Any) -> bool:
        body = agent_pb2.Frame.FromString(room.frame).WhichOneof("body")
        if self._body:
            return body == self._body
        # Rows of figures are many tensors: what one bit may cost is counted in tensors.
        declared = body not in ("record", "chunk", "figure_rows")
        return len(room.data) >= 16 or (declared and self._control.flip_at == "head")

    def _flip(self, told: int, written: int) -> None:
        for ring, room in self._published:
            if told < room.end_position <= written and self._control.flips:
                self._flip_in(ring, room)
                self._control.flips -= 1
                self._control.hit("flip")
        # Views of a slab keep it mapped.
        if not self._control.flips:
            self._published.clear()

    def _flip_in(self, ring: Any, room: Any) -> None:
        if self._control.flip_at == "data":
            room.data[len(room.data) // 2] ^= 0x10
            return
        length = len(room.frame) if self._control.flip_at == "frame" else 0
        middle = ENTRY_HEAD.size + length // 2 if length else ENTRY_HEAD.size // 2
        ring.mapping.memory[RING_OFFSET + room.offset + middle] ^= 0x10


def play(part: RankConfiguration, over: threading.Event) -> None:
    """Dump until told to stop, or so many iterations."""
    control = ControlPage(part.control)
    journal = RankJournal(Path(part.journal))
    witnessed = ClientWitness(journal, control)
    session = rankdump.Session.from_environment(part.environ)
    assert session.active
    journal.say(
        rank=part.rank,
        life=part.life,
        session_id=witnessed.session_id,
        root=part.root,
    )
    iteration = 0
    session.step(iteration)
    while True:
        journal.say(begun=iteration)
        dumped = 0
        for name in names(part.rank, part.life, iteration):
            session.dump(OP_TYPE, op_name(name), "output", name.slot, tensor(name))
            dumped += 1
        session.note(loss=1 / (iteration + 1))
        if over.is_set() or iteration + 1 == part.iterations:
            break
        # Said before: of an iteration that nobody says has ended there may be no manifest.
        journal.say(ended=iteration, expected=dumped)
        iteration += 1
        session.step(iteration)
        over.wait(part.pause_s)
    journal.say(ended=iteration, expected=dumped)
    session.close()
    journal.say(left=witnessed.left)


def main() -> None:
    part = RankConfiguration(**json.loads(sys.argv[1]))
    FaultLayer(ControlPage(part.control), "/nothing")
    over = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: over.set())
    play(part, over)


if __name__ == "__main__":
    main()
