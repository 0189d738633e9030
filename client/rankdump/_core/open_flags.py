"""How to open files of a tree that somebody else may have replaced."""

from __future__ import annotations

import os

READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags of `os.open` for reading a file.

A link in its place, which may lead out of the tree, is an error. A pipe is opened at once; without
O_NONBLOCK the call would wait for a writer, maybe for ever. Child processes do not inherit the
descriptor. Whether it is a regular file at all, `os.fstat` says.
"""
