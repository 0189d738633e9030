"""Comparison of two dumps: which calls and tensors correspond to each other, how much they differ,
and in which call a difference starts. Offline.

The package itself imports nothing, because a worker process, or a script that only dumps, needs
single modules of it.
"""
