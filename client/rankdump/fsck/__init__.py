"""Checks a tree: every file against its manifest and its digest, and what stands beside them.

Reads nothing through a link, and changes nothing unless it is asked to mend; a tensor is never
removed, damaged or not.
"""

from rankdump.fsck.repair import check_left, mend
from rankdump.fsck.run import check_tree
from rankdump.fsck.values import ADVICE, Damage, Kind, Report

__all__ = ["ADVICE", "Damage", "Kind", "Report", "check_left", "check_tree", "mend"]
