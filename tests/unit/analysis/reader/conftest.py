from __future__ import annotations

from pathlib import Path

import pytest
from support.tree_builder import TreeBuilder


@pytest.fixture
def tree(tmp_path: Path) -> TreeBuilder:
    """An empty tree to write into."""
    return TreeBuilder(tmp_path / "tree")
