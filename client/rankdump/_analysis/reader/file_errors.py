"""Errors about files: raised with the path in front, or collected as problems."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from rankdump.errors import CorruptedError


@contextmanager
def named_errors(path: str | Path) -> Generator[None]:
    """Add the path to errors about a file; CorruptedError if the file cannot be read or
    is damaged.
    """
    try:
        yield
    except OSError as error:
        raise CorruptedError(f"{path}: cannot be read: {error.strerror}") from None
    except CorruptedError as error:
        raise CorruptedError(f"{path}: {error}") from None


@contextmanager
def noted_errors(problems: list[str]) -> Generator[None]:
    """Add an error about a damaged file to the problems, and continue after the block."""
    try:
        yield
    except CorruptedError as error:
        problems.append(str(error))
