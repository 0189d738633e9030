"""Adapter of MindSpore: observes the cells and API calls of a model. MindSpore is imported in this
package only; code that must work without MindSpore must not import this package.
"""

from __future__ import annotations

from rankdump._frameworks.mindspore.api_framework import MindSporeApiHook
from rankdump._frameworks.mindspore.cell_hook import (
    MindSporeCellHook,
    MindSporeOutermostWatch,
    set_dump,
)

__all__ = ["MindSporeApiHook", "MindSporeCellHook", "MindSporeOutermostWatch", "set_dump"]
