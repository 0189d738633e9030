"""Examples in docstrings are run, so a changed name or result is found."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

ROOT = Path(__file__).resolve().parents[3]


def list_modules_with_examples() -> list[ParameterSet]:
    """Return the modules whose docstrings hold examples, by their dotted names."""
    found: list[ParameterSet] = []
    for source in (ROOT / "client", ROOT / "daemon"):
        for path in sorted(source.rglob("*.py")):
            if ">>> " in path.read_text():
                parts = path.relative_to(source).with_suffix("").parts
                name = ".".join(part for part in parts if part != "__init__")
                marks = [pytest.mark.torch] if "torch" in parts else []
                found.append(pytest.param(name, marks=marks))
    return found


@pytest.mark.parametrize("name", list_modules_with_examples())
def test_docstring_examples_give_the_shown_results(name: str):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted
    assert not result.failed
