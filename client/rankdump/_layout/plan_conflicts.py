"""Settings of a plan that exclude each other in its layout. Pure."""

from __future__ import annotations

from rankdump._core.plan import DumpPlan
from rankdump._layout.tree_layouts import LAYOUTS


def find_contradiction(plan: DumpPlan) -> str:
    """Return which settings of a plan of a known layout contradict each other; empty for none."""
    output, content = plan.output, plan.content
    layout, by_operator = LAYOUTS[output.layout], content.tables == "operator"
    if not layout.shares_timestamps and (output.file_format == "bin" or by_operator):
        files = "bin files" if output.file_format == "bin" else "tables of operators"
        return f"layout {output.layout!r} has no {files}"
    if output.file_format == "bin" and content.saved == "full":
        return "file_format 'bin' with saved_data 'full': only npy files can have statistics"
    if by_operator and content.saved == "full":
        return "tables in the place of operators' files cannot be combined with saved_data 'full'"
    if layout.api_files is not None and content.saved == "tensor":
        return f"layout {output.layout!r} does not support saved_data 'tensor': it has statistics"
    return ""
