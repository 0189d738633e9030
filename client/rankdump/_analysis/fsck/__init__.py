"""Check of a tree: every file is compared with its manifest and its digest, and files that no
manifest names are found. Follows no link, and changes nothing except in a repair. A tensor is never
removed, damaged or not, unless another file of the tree contains it as well.
"""

from __future__ import annotations

from rankdump._analysis.fsck.damage import DAMAGE_ADVICE, CheckReport, DamageKind, FileDamage
from rankdump._analysis.fsck.repair import check_tree_unlocked, repair_tree
from rankdump._analysis.fsck.tree_check import check_tree

__all__ = [
    "DAMAGE_ADVICE",
    "CheckReport",
    "DamageKind",
    "FileDamage",
    "check_tree",
    "check_tree_unlocked",
    "repair_tree",
]
