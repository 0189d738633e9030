"""Prevents that a process imports pandas. pyarrow imports pandas, if it is installed, at its first
array in order to recognise pandas objects: 57 MB and a second of processor time without any use in
our own processes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _FinderWithoutPandas(PathFinder):
    """Finds every installed module except pandas.

    An exception would have the same effect on an import, but it would end
    `importlib.util.find_spec`, with which bokeh asks whether pandas is installed. None in
    `sys.modules` would not work either: pyarrow's compiled code does not take it for a missing
    module.
    """

    @classmethod
    def find_spec(
        cls,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return the specification of a module; None if it is pandas or not installed."""
        return None if fullname == "pandas" else super().find_spec(fullname, path, target)


def leave_pandas_out() -> None:
    """Make imports of pandas in this process fail from now on; only for processes of our own."""
    found = (_FinderWithoutPandas if each is PathFinder else each for each in sys.meta_path)
    sys.meta_path[:] = found
