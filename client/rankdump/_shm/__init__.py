"""Shared-memory ring between a rank and its agent: format, writer and reader of the slab. Pure:
works on any buffer or store.
"""
