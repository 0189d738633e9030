"""Shared-memory slabs of local ranks: their files, the rings in them, and the registry of the
sessions that have one.
"""
