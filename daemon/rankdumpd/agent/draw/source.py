"""The stack of an operator as lines of a graph file. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from rankdump.contract.graph import SourceLine
from rankdump.contract.key import one_line


def stack_lines(source: Iterable[SourceLine]) -> list[str]:
    """Return `# In file FILE:LINE/CODE/` for each frame, in the order given."""
    return [
        f"# In file {one_line(frame.file)}:{frame.line}/{one_line(frame.code)}/" for frame in source
    ]
