"""Pairs two lists of API calls as troubleshooter's `api_dump_compare` does. Pure.

`match` finds which calls stand for each other, `aligned` which tensors of two such calls do. Only
names and shapes decide, so it works across frameworks, and numbers of calls play no part
(api-dump.md A.6).
"""

from rankdump.diff.flow.match import match
from rankdump.diff.flow.spelling import shared_name
from rankdump.diff.flow.tensors import aligned
from rankdump.diff.flow.values import FlowCall, Shape, Span

__all__ = ["FlowCall", "Shape", "Span", "aligned", "match", "shared_name"]
