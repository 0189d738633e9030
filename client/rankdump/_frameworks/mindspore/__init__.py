"""Adapter of MindSpore: observes cells and API calls of a model. MindSpore is imported in this
package and nowhere else; nothing without MindSpore may import it.
"""

from __future__ import annotations

from rankdump._frameworks.mindspore.api_framework import MindSporeApiHook
from rankdump._frameworks.mindspore.cell_hook import (
    MindSporeCellHook,
    MindSporeOutermostWatch,
    set_dump,
)

__all__ = ["MindSporeApiHook", "MindSporeCellHook", "MindSporeOutermostWatch", "set_dump"]
