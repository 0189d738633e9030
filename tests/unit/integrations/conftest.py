"""A session that keeps what a loop asks of it."""

from __future__ import annotations

from typing import Any, SupportsIndex

import pytest

import rankdump


class SessionJournal(rankdump.Session):
    """Stands for a session with an agent: keeps calls in the order in which they came."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.calls: list[object] = []
        self.attached: list[Any] = []
        self._fails = fails

    @property
    def active(self) -> bool:
        return True

    def attach(self, model: Any, name: str = "", *, inside_compiled: bool = False) -> None:
        self.attached.append(model)
        self.models.append(type(model).__name__)

    def step(self, iteration: int | None = None) -> None:
        if self._fails:
            raise RuntimeError("disk on fire")
        self.calls.append(iteration)

    def microbatch(self, index: SupportsIndex) -> None:
        self.calls.append(f"micro {index}")

    def close(self) -> None:
        self.closed = True
        self.calls.append("closed")


@pytest.fixture
def session() -> SessionJournal:
    return SessionJournal()


@pytest.fixture
def failing_session() -> SessionJournal:
    return SessionJournal(fails=True)
