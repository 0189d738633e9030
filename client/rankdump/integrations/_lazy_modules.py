"""Modules that are loaded on first use, and the error for a framework that is not installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import ModuleType


def make_module_loader(package: str, names: Sequence[str]) -> Callable[[str], ModuleType]:
    """Return the `__getattr__` of a package whose modules are imported when they are first used.

    AttributeError for any other name, as for any module.
    """

    def load_module(name: str) -> ModuleType:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return importlib.import_module(f"{package}.{name}")

    return load_module


def make_missing_error(module: str, error: ImportError, *, install: str) -> ImportError:
    """Return the error for a module whose framework cannot be imported, as one line.

    `install` is the name with which pip installs the framework.

    >>> error = ModuleNotFoundError("No module named 'lightning'", name="lightning")
    >>> str(make_missing_error("rankdump.integrations.lightning", error, install="lightning"))
    "rankdump.integrations.lightning: No module named 'lightning'; pip install lightning"
    """
    return ImportError(f"{module}: {error}; pip install {install}", name=error.name)
