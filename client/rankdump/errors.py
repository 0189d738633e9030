"""Errors that rankdump raises, and nothing else. Imports nothing of rankdump.

    RankdumpError
    |-- PermanentError      the same input fails the same way again
    |   |-- ConfigError     a configuration has a value that is not allowed
    |   |-- RejectedError   the other side understood the request and rejected it
    |   |   `-- ForbiddenError  the caller may not do this
    |   |-- UnsupportedError  a tensor whose bytes no format here can hold
    |   |-- ProtocolError   a message that contradicts itself or its predecessors
    |   `-- CorruptedError  a file is not what its name or its checksum says
    |       `-- EmptyFileError  the file is empty
    `-- RetryableError      the same input may pass later
        |-- ResendError     frames did not arrive as they were sent
        |-- UnavailableError  nobody answers, or the other side is about to stop
        `-- ExhaustedError  no space: memory, disk, descriptors

A message names what failed, which one, and the number or value at fault.
"""

from __future__ import annotations


class RankdumpError(Exception):
    """Root of the tree above."""


class PermanentError(RankdumpError):
    """The same input fails the same way again."""


class ConfigError(PermanentError):
    """A configuration says something it may not: one line with file, key, value and what is legal.

    >>> str(ConfigError("a.json", "input_output", 7, "0, 1 or 2"))
    "a.json: input_output: 7 is not allowed; allowed: 0, 1 or 2"
    """

    def __init__(self, file: str, key: str, value: object, allowed: str) -> None:
        super().__init__(file, key, value, allowed)
        self.file, self.key, self.value, self.allowed = file, key, value, allowed

    def __str__(self) -> str:
        """Return the one line a user reads."""
        where = f"{self.file}: {self.key}" if self.key else self.file
        shown = "missing" if self.value is MISSING_VALUE else f"{self.value!r} is not allowed"
        return f"{where}: {shown}; allowed: {self.allowed}"


MISSING_VALUE = object()
"""Stands for a value that is not there at all, where None could be one."""


class RejectedError(PermanentError):
    """The other side understood the request and said no."""


class ForbiddenError(RejectedError):
    """It is not for this caller: the certificate, the token or the role is not the right one."""


class UnsupportedError(PermanentError):
    """A tensor whose bytes no format here can hold."""


class ProtocolError(PermanentError):
    """A message contradicts itself or its predecessors."""


class CorruptedError(PermanentError):
    """A file is not what its name or its checksum says."""


class EmptyFileError(CorruptedError):
    """There is nothing in a file that should hold something."""


class RetryableError(RankdumpError):
    """The same input may pass later."""


class ResendError(RetryableError):
    """Frames did not come as they were sent: one is missing, or cannot be read."""


class UnavailableError(RetryableError):
    """Nobody answers, or they are about to stop."""


class ExhaustedError(RetryableError):
    """No space is left: memory, disk or descriptors."""
