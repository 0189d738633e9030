"""The source, cleared of what stands in the tree: behind its commit, and only the same file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from rankdumpd.ingest.settled import leased
from rankdumpd.ingest.source import Source
from rankdumpd.ingest.state import State
from rankdumpd.ingest.values import Taken


class Clearing:
    """Removes sources; not for use from several threads."""

    def __init__(self, source: Source, state: State, stands: Callable[[Taken], bool]) -> None:
        """`stands` says whether the copy of a file is in the tree."""
        self._source, self._state, self._stands = source, state, stands

    def remove(self, files: Iterable[Taken]) -> int:
        """Remove those that are still what was taken; return how many."""
        gone = [file.path for file in files if self._source.remove(file.path, file.source)]
        if gone:
            self._state.removed(gone)
        return len(gone)

    def remove_rest(self) -> int:
        """Remove what may have been appended to until now, and the folders that are empty then."""
        gone = self.remove(file for file in self._state.plain() if self._unused(file))
        self._source.remove_empty()
        return gone

    def _unused(self, file: Taken) -> bool:
        """Return whether a copy stands in the tree and nobody has the source open for writing."""
        try:
            descriptor = self._source.open(file.path)
        except OSError:
            return False
        try:
            with leased(descriptor) as free:
                return free is not False and self._stands(file)
        finally:
            os.close(descriptor)
