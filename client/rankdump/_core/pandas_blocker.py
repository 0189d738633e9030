"""Keeps pandas out of a process. pyarrow imports it at its first array, where it is installed, to
recognise its columns: 57 MB and a second of processor time, for nothing in our own processes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType


class _PandasBlocker(MetaPathFinder):
    """Says that pandas is not installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        """Raise ModuleNotFoundError for pandas."""
        if fullname == "pandas":
            raise ModuleNotFoundError("this process does without pandas", name=fullname)


def leave_pandas_out() -> None:
    """Let no module of this process import pandas from now on; only for processes of our own."""
    sys.meta_path.insert(0, _PandasBlocker())
