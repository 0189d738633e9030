"""Compares two dumps: what is paired, how far it is apart, and where it starts."""

from rankdump.diff.run import compare
from rankdump.diff.values import Report

__all__ = ["Report", "compare"]
