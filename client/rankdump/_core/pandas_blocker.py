"""Keeps pandas out of a process. pyarrow imports it at its first array, where it is installed, to
recognise its columns: 57 MB and a second of processor time, for nothing in our own processes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _FinderWithoutPandas(PathFinder):
    """Finds every installed module but pandas.

    An exception would tell an import the same, but end `importlib.util.find_spec`, with which bokeh
    asks whether pandas is installed. The compiled code of pyarrow does not take None in
    `sys.modules` as a module that is missing.
    """

    @classmethod
    def find_spec(
        cls,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return what describes the module; None where it is pandas, or not installed."""
        return None if fullname == "pandas" else super().find_spec(fullname, path, target)


def leave_pandas_out() -> None:
    """Let no module of this process import pandas from now on; only for processes of our own."""
    found = (_FinderWithoutPandas if each is PathFinder else each for each in sys.meta_path)
    sys.meta_path[:] = found
