"""Reader of growing trees: a file with its final name must be complete at any moment."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path

from faults.observation import compared
from faults.tensor_content import name_of, tensor

from rankdump._core.manifest import Manifest
from rankdump.errors import RankdumpError
from rankdump.reader import load_file

_EVERY_S = 0.1
_MANIFESTS = 20
"""Manifests that are read at once; a growing tree has hundreds."""


class TreeWatcher:
    """Thread that reads files of the trees and records what was wrong."""

    def __init__(self, roots: Sequence[Path], seed: int) -> None:
        self._roots, self._dice = roots, random.Random(seed)
        self._known: set[Path] = set()
        self._over = threading.Event()
        self.complaints: list[str] = []
        self.looks = self.manifests = 0
        self._thread = threading.Thread(target=self._run, daemon=True, name="rig-tree-watcher")
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(_EVERY_S):
            for root in self._roots:
                try:
                    self._look_at_file(root)
                    self._look_at_manifests(root)
                except OSError:
                    continue

    def _look_at_file(self, root: Path) -> None:
        ranks = [each for each in root.glob("rank_*") if each.is_dir()]
        folder = self._dice.choice(ranks) if ranks else root
        while below := _visible(folder):
            each = Path(self._dice.choice(below).path)
            if each.is_dir():
                folder = each
                continue
            if each.name.endswith((".npy", ".npy.zst")):
                self._check(each, int(folder.parent.parent.parent.name.partition("_")[2]))
            return

    def _check(self, path: Path, rank: int) -> None:
        op, _, slot = path.name.partition(".output.")
        name = name_of(rank, int(path.parent.name), op.split(".")[1], int(slot.split(".")[0]))
        self.looks += 1
        try:
            fault = "nobody's" if name is None else compared(load_file(path), tensor(name))
        except (RankdumpError, OSError) as error:
            fault = f"cannot be read: {error}"
        if fault and path.exists():
            self.complaints.append(f"{path}, while the run went on: {fault}")

    def _look_at_manifests(self, root: Path) -> None:
        new = set(root.glob("rank_*/.dump_metadata/manifest/*.json")) - self._known
        for path in sorted(new)[:_MANIFESTS]:
            self._known.add(path)
            self.manifests += 1
            try:
                manifest = Manifest.from_json(path.read_bytes())
            except RankdumpError as error:
                self.complaints.append(f"{path}, while the run went on: {error}")
                continue
            for record in manifest.records:
                if record.path and not (root / record.path).is_file():
                    self.complaints.append(f"{path} names {record.path}, which was not there")


def _visible(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as listed:
        return [each for each in listed if not each.name.startswith(".")]
