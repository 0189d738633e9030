"""Fixtures of the tests of single faults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.agent_rig import AgentRig


@pytest.fixture
def rig(socket_folder: Path) -> Iterator[AgentRig]:
    """An agent with a failing file layer."""
    made = AgentRig(socket_folder)
    yield made
    made.close()
