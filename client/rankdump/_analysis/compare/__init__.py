"""Comparison of two dumps: the calls and tensors that stand for each other, how far they are apart,
and the call where a difference starts. Offline.

The package imports nothing: a worker process, or a script that only dumps, needs single modules
of it.
"""
