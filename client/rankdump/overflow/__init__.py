"""Finds overflow files in a tree and the operators that they speak of; offline. Never writes."""

from rankdump.overflow.search import Hit, Record, Search, search

__all__ = ["Hit", "Record", "Search", "search"]
