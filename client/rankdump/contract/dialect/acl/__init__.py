"""CANN's `acl.json`, as `aclInit` and `aclmdlSetDump` read it. Pure.

Facts: ascend-formats.md 4. A refusal ends in the code that CANN reports for it, such as (EP0003).
"""

from rankdump.contract.dialect.acl.document import parse

__all__ = ["parse"]
