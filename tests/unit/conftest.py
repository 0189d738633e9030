"""An agent that tests of the client talk to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.agent_double import RunningFakeAgent


@pytest.fixture
def address(socket_folder: Path) -> str:
    return f"unix://{socket_folder}/a.sock"


@pytest.fixture
def running(address: str) -> Iterator[RunningFakeAgent]:
    server = RunningFakeAgent(address)
    yield server
    server.stop()
