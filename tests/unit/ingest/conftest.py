"""Shorter waits for files that may still change."""

from __future__ import annotations

import pytest


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run ends when its youngest file is that old, 2 s otherwise."""
    monkeypatch.setattr("rankdumpd.ingest.engine.REMOVAL_DELAY_S", 0.02)
    monkeypatch.setattr("rankdumpd.ingest.file_copy.SETTLE_TIME_S", 0.02)
