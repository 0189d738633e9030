"""The arrows and sizes of the house, held by machine."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    path
    for half in ("client/rankdump", "daemon/rankdumpd")
    for path in (ROOT / half).rglob("*.py")
    if "v1" not in path.parts
)
MODULE_LINES, FUNCTION_LINES = 700, 60


def test_import_contracts():
    """Data flows one way: every arrow of docs/architecture.md is a contract in pyproject.toml."""
    tool = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_a_file_fits_in_the_head(path: Path):
    text = path.read_text()
    assert text.count("\n") <= MODULE_LINES
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "a module says what it does and what it will not"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= FUNCTION_LINES, f"{node.name} has {lines} lines"


def test_nothing_unpickles():
    """Law: no read path ever runs what a file says."""
    for path in SOURCES:
        text = path.read_text()
        assert "import pickle" not in text, path
        assert "allow_pickle=True" not in text, path
