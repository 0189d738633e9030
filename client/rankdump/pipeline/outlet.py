"""Where a rank's records leave: counted, and sent at once or at the end of the iteration."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeAlias

from rankdump.accounts import Accounts
from rankdump.contract.exchange import Declaration, KernelArguments, OperatorArguments
from rankdump.measure import Batch, Measured, Unread
from rankdump.pipeline.reading import Lost, Read
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
        stage: Stage,
        submit: Callable[[Staged | Declaration], None],
        on_lost: Callable[[str, str], None],
        at_end: bool,
        batch_records: int,
    ) -> None:
        """Hold back records to the end of the iteration, or until as many wait as a batch takes."""
        self._accounts = accounts
        self._stage = stage
        self._submit = submit
        self._on_lost = on_lost
        self._at_end = at_end
        self._batch = Batch(batch_records)
        self._lock = threading.Lock()
        self._in_turn = threading.Lock()
        self._arguments: list[OperatorArguments] = []

    def send(self, item: Item, iteration: int) -> None:
        """Send what is kept of an operator of the running iteration."""
        if isinstance(item, OperatorArguments):
            self._collect(item, iteration)
        elif isinstance(item, Lost):
            self._lose(item)
        elif self._at_end or isinstance(item, Measured):
            if self._batch.add(item):
                self._send_batch()
        else:
            self._send(item)

    def forget(self, items: Iterable[object]) -> None:
        """Give back the room of records that nobody wants."""
        for item in items:
            if isinstance(item, (Staged, Measured)):
                self._stage.release(item.head)

    def flush(self, iteration: int) -> None:
        """Send what waited for the end of the iteration."""
        self._send_batch()
        with self._lock:
            self._send_arguments(iteration)

    def _send_batch(self) -> None:
        with self._in_turn:
            for record in self._batch.read():
                if isinstance(record, Unread):
                    self._stage.release(record.head)
                    key = record.head.key
                    self._lose(Lost(key.iteration, key.op_name, FIGURES_FAILED))
                else:
                    self._send(record)

    def _send(self, record: Staged) -> None:
        self._accounts.took(record.head.key.iteration)
        self._submit(record)

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
