"""Where a rank's records and rows leave: counted, and sent at once or many together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeAlias

from rankdump.accounts import Accounts, Stalls
from rankdump.contract.exchange import Declaration, KernelArguments, OperatorArguments
from rankdump.contract.figure_rows import FigureRows
from rankdump.measure import Batch, Measure, Row, Unread
from rankdump.pipeline.reading import BUFFER_FULL, Lost, Read
from rankdump.stage import Stage
from rankdump.values import Staged

FIGURES_FAILED = "figures_failed"
_ARGUMENTS_AT_ONCE = 500

Item: TypeAlias = "Read | OperatorArguments"
"""What can be kept of an operator."""


class Outlet:
    """Takes items in the order in which they are to stand; safe to use from several threads."""

    def __init__(
        self,
        *,
        accounts: Accounts,
        stalls: Stalls,
        stage: Stage,
        measure: Measure | None,
        submit: Callable[[Staged | Declaration], None],
        on_lost: Callable[[str, str], None],
        batch_rows: int,
    ) -> None:
        """Rows wait for the end of the iteration, or until as many wait as a batch takes."""
        self._accounts = accounts
        self._stalls = stalls
        self._stage = stage
        self._measure = measure
        self._submit = submit
        self._on_lost = on_lost
        self._batch = Batch(batch_rows)
        self._lock = threading.Lock()
        self._in_turn = threading.Lock()
        self._arguments: list[OperatorArguments] = []

    def send(self, item: Item, iteration: int) -> None:
        """Send what is kept of an operator of the running iteration."""
        if isinstance(item, Row):
            if self._batch.add(item):
                self._send_rows()
        elif isinstance(item, Staged):
            self._accounts.took(item.head.iteration)
            self._submit(item)
        elif isinstance(item, Lost):
            self._lose(item)
        else:
            self._collect(item, iteration)

    def forget(self, items: Iterable[object]) -> None:
        """Give back the room of records that nobody wants."""
        for item in items:
            if isinstance(item, Staged):
                self._stage.release(item)

    def flush(self, iteration: int) -> None:
        """Send what waited for the end of the iteration."""
        self._send_rows()
        with self._lock:
            self._send_arguments(iteration)

    def _send_rows(self) -> None:
        if self._measure is None:
            return
        with self._stalls.counted(), self._in_turn:
            for rows in self._batch.read(self._measure):
                if isinstance(rows, Unread):
                    self._lose(Lost(rows.iteration, rows.op_name, FIGURES_FAILED))
                elif self._stage.admit(rows):
                    self._accounts.took(rows.iteration, len(rows))
                    self._submit(rows)
                else:
                    self._lose_rows(rows)

    def _lose_rows(self, rows: FigureRows) -> None:
        self._accounts.lost(rows.iteration, BUFFER_FULL, len(rows))
        self._on_lost(BUFFER_FULL, rows.kinds[0].op_name)

    def _lose(self, lost: Lost) -> None:
        self._accounts.lost(lost.iteration, lost.reason)
        self._on_lost(lost.reason, lost.op_name)

    def _collect(self, arguments: OperatorArguments, iteration: int) -> None:
        with self._lock:
            self._arguments.append(arguments)
            if len(self._arguments) >= _ARGUMENTS_AT_ONCE:
                self._send_arguments(iteration)

    def _send_arguments(self, iteration: int) -> None:
        operators, self._arguments = tuple(self._arguments), []
        if operators:
            self._submit(KernelArguments(iteration, operators))
