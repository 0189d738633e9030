"""Compares two dumps: what is paired, how far it is apart, and where it starts.

Imports nothing: a worker of a pool, or a script that only dumps, needs parts of it alone.
"""
