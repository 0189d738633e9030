"""Raw files of freezes that wait to be written as trees: those of this process, and those that an
earlier one left. One that cannot be written now is tried again; a damaged one is set aside.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rankdump._core.freeze_record import FreezeRecord
from rankdump.errors import CorruptedError, RankdumpError, UnavailableError
from rankdumpd.agent.blackbox.freeze_state import FreezeOrder
from rankdumpd.agent.blackbox.frozen_tree import FrozenTreeWriter
from rankdumpd.agent.blackbox.raw_freeze import RawFreezeFolder, read_raw_record

RETRY_INTERVAL_S = 10.0

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WrittenFreeze:
    """A freeze whose tree is written, and those who wait for it."""

    record: FreezeRecord
    root: str
    orders: tuple[FreezeOrder, ...]


@dataclass(slots=True)
class _WaitingFile:
    """A raw file, and why it could not be written when it was tried last."""

    orders: list[FreezeOrder] = field(default_factory=list[FreezeOrder])
    due_s: float = 0.0
    problem: str = ""


class RawBacklog:
    """The raw files that wait; `findings` may be called from other threads."""

    def __init__(
        self, raw: RawFreezeFolder, writer: FrozenTreeWriter, clock: Callable[[], float]
    ) -> None:
        self._raw, self._writer, self._clock = raw, writer, clock
        self._waiting: dict[Path, _WaitingFile] = {}
        self._damaged: list[str] = []

    def find_left(self) -> list[FreezeRecord]:
        """Find the files that an earlier process left; return the records that can be read."""
        records: list[FreezeRecord] = []
        # One that cannot be removed harms nothing.
        with contextlib.suppress(OSError):
            self._raw.remove_drafts()
        for path in self._raw.list_files():
            self._waiting.setdefault(path, _WaitingFile())
            # What is wrong with a file is said when it is written.
            with contextlib.suppress(OSError, CorruptedError), path.open("rb") as file:
                records.append(read_raw_record(file))
        return records

    def add(self, path: Path, orders: Sequence[FreezeOrder]) -> None:
        """Add a file of this process."""
        self._waiting[path] = _WaitingFile(list(orders))

    def findings(self) -> list[str]:
        """Return which frozen trees are not written, a sentence each."""
        late = [each.problem for each in list(self._waiting.values()) if each.problem]
        return [*self._damaged, *late]

    def write_due(self) -> Iterator[WrittenFreeze]:
        """Write the trees that can be written now, and yield each."""
        for path, waiting in list(self._waiting.items()):
            if waiting.due_s > self._clock():
                continue
            try:
                found = self._writer.write(path)
                if found is None:
                    return
                self._raw.remove(path)
            except OSError as error:
                self._postpone(path, waiting, error)
                continue
            except Exception as error:
                self._set_aside(path, waiting, error)
                continue
            del self._waiting[path]
            yield WrittenFreeze(*found, tuple(waiting.orders))

    def _postpone(self, path: Path, waiting: _WaitingFile, error: OSError) -> None:
        problem = f"a frozen tree is not written yet, its steps are in {path}: {error}"
        if problem != waiting.problem:
            _logger.error("%s", problem)
        waiting.problem, waiting.due_s = problem, self._clock() + RETRY_INTERVAL_S
        _refuse(waiting, UnavailableError(problem))

    def _set_aside(self, path: Path, waiting: _WaitingFile, error: Exception) -> None:
        del self._waiting[path]
        try:
            path = self._raw.set_aside(path)
        except OSError as failure:
            _logger.error("%s cannot be renamed: %s", path, failure)
        problem = f"a frozen tree cannot be written, its steps are in {path}: {error}"
        _logger.error("%s", problem, exc_info=None if isinstance(error, RankdumpError) else error)
        self._damaged.append(problem)
        _refuse(waiting, UnavailableError(problem))


def _refuse(waiting: _WaitingFile, error: Exception) -> None:
    for order in waiting.orders:
        order.answer.set_exception(error)
    waiting.orders.clear()
