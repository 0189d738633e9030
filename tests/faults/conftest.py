"""What the tests of single faults get."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.stand import Stand


@pytest.fixture
def stand(socket_folder: Path) -> Iterator[Stand]:
    """An agent with a failing file layer."""
    made = Stand(socket_folder)
    yield made
    made.close()
