"""Shared-memory slabs of local ranks: their files, the rings in them, and which session has
which.
"""
