"""Full names of files that stand under short ones, in the `mapping.csv` of their folder."""

from __future__ import annotations

import threading

from rankdump.contract.layout.place import MAPPING_FILE, Place
from rankdumpd.agent.tree import Tree

_MAX_MAPPED_FOLDERS = 64


class Names:
    """The mapping files of one tree; safe to use from several threads."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._lock = threading.Lock()
        self._mapped: dict[str, set[str]] = {}

    def note(self, place: Place) -> None:
        """Write down what a place is called in full, once, before its file is there."""
        if not place.mapped_from:
            return
        # Under the lock as a whole: two tensors of a name must not both add its line.
        with self._lock:
            if place.folder not in self._mapped:
                if len(self._mapped) >= _MAX_MAPPED_FOLDERS:
                    self._mapped.clear()
                lines = self._tree.lines(place.folder, MAPPING_FILE)
                self._mapped[place.folder] = {line.partition(",")[0] for line in lines}
            names = self._mapped[place.folder]
            if place.name not in names:
                line = f"{place.name},{place.mapped_from}"
                self._tree.append_lines(place.folder, MAPPING_FILE, (line,))
                names.add(place.name)
