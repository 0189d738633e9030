"""One rank of a job without end, which writes down what it did.

python -m faults.rank JSON, where JSON is a `Part`; SIGUSR1 ends it well.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from faults.content import OP_TYPE, names, op_name, tensor
from faults.control import Control
from faults.journal import Journal
from faults.layer import Layer

import rankdump
from rankdump.contract.errors import DamagedError
from rankdump.contract.slab import SlabReader
from rankdump.ship import Ship
from rankdump.ship.depot import Depot
from rankdump.ship.outgoing import Outgoing

Requests: TypeAlias = Callable[[Outgoing, int], Iterator[Any]]


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank is to play."""

    rank: int
    life: int
    journal: str
    control: str
    root: str
    pause_s: float
    environ: dict[str, str] | None = None
    iterations: int = 0
    """How many; 0 means until it is told to stop."""


class Witnessed:
    """The client's own objects, with an eye on them; for the only session of a process."""

    def __init__(self, journal: Journal, control: Control) -> None:
        self.session_id = ""
        self.left = 1
        self._journal, self._control = journal, control
        self._wrap_ship()
        self._wrap_depot()
        self._wrap_outgoing()

    def _wrap_ship(self) -> None:
        begin, close, witnessed = Ship.__init__, Ship.close, self

        def begun(ship: Ship, request: Any, *args: Any, **fields: Any) -> None:
            witnessed.session_id = request.session_id
            begin(ship, request, *args, **fields)

        def closed(ship: Ship, patience_s: float) -> int:
            lost = close(ship, patience_s)
            witnessed.left = lost + ship.left_in_slab
            if ship._depot.items.outstanding:
                witnessed.left += 1
            return lost

        Ship.__init__, Ship.close = begun, closed

    def _wrap_depot(self) -> None:
        acknowledge, journal = Depot.acknowledge, self._journal

        def acknowledged(depot: Depot, sequence: int) -> None:
            acknowledge(depot, sequence)
            journal.acknowledged(depot.items.acknowledged)

        Depot.acknowledge = acknowledged

    def _wrap_outgoing(self) -> None:
        Outgoing.requests = flipping(Outgoing.requests, self._control)


def flipping(requests: Requests, control: Control) -> Requests:
    """Return what makes requests as before, but flips bits of a slab where the page wants it."""

    def wrapped(outgoing: Outgoing, stream: int) -> Iterator[Any]:
        ring = outgoing._depot.ring
        for request in requests(outgoing, stream):
            if control.flips and ring is not None and request.HasField("doorbell"):
                # Another lap may begin where this one looks.
                with contextlib.suppress(DamagedError):
                    flip(ring._mapping.memory, request.doorbell.written, control)
            yield request

    return wrapped


def flip(memory: memoryview, written: int, control: Control) -> None:
    """Flip a bit of the last entry before a position, which nobody was told of yet."""
    for entry in SlabReader(memory).entries(written):
        if entry.end == written and entry.whole and len(entry.data) >= 16:
            place = np.frombuffer(entry.data, np.uint8).ctypes.data + len(entry.data) // 2
            byte = ctypes.c_ubyte.from_address(place)
            byte.value ^= 0x10
            control.flips -= 1
            control.hit("flip")


def play(part: Part, over: threading.Event) -> None:
    """Dump until told to stop, or so many iterations."""
    control = Control(part.control)
    journal = Journal(Path(part.journal))
    witnessed = Witnessed(journal, control)
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
    part = Part(**json.loads(sys.argv[1]))
    Layer(Control(part.control), "/nothing")
    over = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: over.set())
    play(part, over)


if __name__ == "__main__":
    main()
