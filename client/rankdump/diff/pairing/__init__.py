"""Which call of one program stands for which of the other: rules, each on what is left."""

from rankdump.diff.pairing.pair import check_rules, pair

__all__ = ["check_rules", "pair"]
