"""Agent in this process with ranks and a fault layer, for tests of single faults."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.control_page import ControlPage
from faults.fault_layer import FaultLayer
from faults.observation import tree
from faults.oracle import once
from faults.tensor_content import OP_TYPE, kept, names, op_name, tensor
from faults.values import LedgerContent, RunObservation
from integration.conftest import WAIT_S, EmbeddedAgent
from support.worker_host import RankPlace

import rankdump
from rankdump._core.status import IterationStatus

MIB = 1 << 20
EACH = sum(map(kept, names(0, 0, 0)))
"""Tensors that an iteration keeps."""


class AgentRig:
    """One agent and its tree."""

    def __init__(self, folder: Path) -> None:
        """Tree and state are folders in this one, and may be separate disks."""
        self.folder = folder
        self.root = folder / "tree" / "dump"
        self.control = ControlPage(folder / "control")
        self.layer = FaultLayer(self.control, str(self.root))
        self.agent = EmbeddedAgent(
            folder,
            encode_threads=2,
            keep_free_bytes=0,
            runtime_dir=str(folder),
            slab_bytes=4 * MIB,
        )

    def close(self) -> None:
        """Undo the layer and stop the agent."""
        self.control.heal()
        self.layer.undo()
        self.agent.stop()

    def session(self, rank: int = 0, *, address: str = "", **own: Any) -> rankdump.Session:
        """Open a session of a rank."""
        place = RankPlace(self.folder, address or self.agent.address)
        place.tree = self.root
        return place.session(rank, **own)

    def play(self, session: rankdump.Session, iteration: int, rank: int = 0, life: int = 0) -> None:
        """Dump one iteration; it ends with the next one, or with the session."""
        dump_iteration(session, iteration, rank, life)

    def status(self) -> list[IterationStatus]:
        """Return how every iteration stands, in their order."""
        return sorted(self.agent.agent.view().iterations, key=lambda each: each.iteration)

    def of(self, iteration: int) -> IterationStatus:
        """Return the status of an iteration; one without reports is empty."""
        known = [each for each in self.status() if each.iteration == iteration]
        return known[0] if known else IterationStatus("", "", 0, iteration, complete=False)

    def settled(self, iterations: int) -> list[IterationStatus]:
        """Return their status once so many are complete."""
        wait_until(lambda: sum(each.complete for each in self.status()) >= iterations)
        found = self.status()
        assert all(each.is_balanced for each in found if each.complete), found
        return found

    def stored(self) -> int:
        """Return how many tensors are in the tree: each exact, none twice, none unknown."""
        files, _, problems = tree(self.root)
        assert not problems
        assert [file for file in files if file.name is None or file.fault] == []
        assert list(once(RunObservation((), LedgerContent((), (), {}), tuple(files), (), {}))) == []
        return len(files)

    def wait_manifests(self, iterations: list[int]) -> None:
        """Return once just these iterations have their manifest."""
        wait_until(lambda: sorted(each.iteration for each in tree(self.root)[1]) == iterations)


def dump_iteration(session: rankdump.Session, iteration: int, rank: int = 0, life: int = 0) -> None:
    """Begin an iteration and dump all its tensors."""
    session.step(iteration)
    for name in names(rank, life, iteration):
        session.dump(OP_TYPE, op_name(name), "output", name.slot, tensor(name))


def wait_until(true: Callable[[], object]) -> None:
    """Return when something is so; only a broken agent makes it wait to the end."""
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.02)):
        if true():
            return
        pause.wait(0.02)
    raise AssertionError("it did not come")
