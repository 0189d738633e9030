"""Time limits of tests that start Python with torch or MindSpore many times."""

from __future__ import annotations

import pytest

TIMEOUT_S = 1800
"""For a test with all programs that it runs: ends one that hangs, and none on a busy machine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test the time that its programs take to import frameworks under load."""
    for item in items:
        item.add_marker(pytest.mark.timeout(TIMEOUT_S))
