"""Errors that rankdump raises. This module imports nothing of rankdump.

    RankdumpError
    |-- PermanentError      the same input fails the same way again
    |   |-- ConfigError     a configuration has a value that is not allowed
    |   |-- RejectedError   the other side understood the request and rejected it
    |   |   `-- ForbiddenError  the caller is not authorised for the request
    |   |-- QueryError      a statement of SQL cannot be run, or ran too long
    |   |-- UnsupportedError  no file format here can hold the elements of a tensor
    |   |-- ProtocolError   a message contradicts itself or an earlier one
    |   `-- CorruptedError  the content of a file does not match its format or checksum
    |       `-- EmptyFileError  a file that must have content is empty
    `-- RetryableError      the same input may succeed later
        |-- ResendError     frames are missing or damaged and must be sent again
        |-- UnavailableError  the other side does not answer or is shutting down
        `-- ExhaustedError  memory, disk space or file descriptors are used up

A message says what failed and names the object, and the number or value that is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "ConfigError",
    "CorruptedError",
    "EmptyFileError",
    "ExhaustedError",
    "ForbiddenError",
    "PermanentError",
    "ProtocolError",
    "QueryError",
    "RankdumpError",
    "RejectedError",
    "ResendError",
    "RetryableError",
    "UnavailableError",
    "UnsupportedError",
]


class RankdumpError(Exception):
    """Base class of all errors that rankdump raises."""


class PermanentError(RankdumpError):
    """The same input fails the same way again."""


class ConfigError(PermanentError):
    """A configuration has a value that is not allowed: file, key, value and allowed values.

    >>> str(ConfigError("a.json", "input_output", 7, "0, 1 or 2"))
    'a.json: input_output: 7 is not allowed; allowed: 0, 1 or 2'
    """

    def __init__(self, file: str, key: str, value: object, allowed: str) -> None:
        super().__init__(file, key, value, allowed)
        self.file, self.key, self.value, self.allowed = file, key, value, allowed

    def __str__(self) -> str:
        """Return the error as one line for the user."""
        where = f"{self.file}: {self.key}" if self.key else self.file
        if isinstance(self.value, UnknownKey):
            shown = f"unknown key; nearest: {self.value.nearest}"
        else:
            shown = "missing" if self.value is MISSING_VALUE else self._describe_value()
        return f"{where}: {shown}; allowed: {self.allowed}"

    def _describe_value(self) -> str:
        text = repr(self.value)
        shown = text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}..."
        return f"{shown} is not allowed"


_MAX_VALUE = 200
"""Characters of a value in the message of a ConfigError."""
MISSING_VALUE = object()
"""Marks a missing value, because None may be a value."""


@dataclass(frozen=True, slots=True)
class UnknownKey:
    """Stands for the value of a key that is unknown."""

    nearest: str
    """The known key that is most similar."""


class RejectedError(PermanentError):
    """The other side understood the request and rejected it."""


class ForbiddenError(RejectedError):
    """The certificate, token or role of the caller does not authorise the request."""


class QueryError(PermanentError):
    """A statement of SQL is not one SELECT, is rejected, or ran too long."""


class UnsupportedError(PermanentError):
    """No file format of rankdump can hold the elements of a tensor."""


class ProtocolError(PermanentError):
    """A message contradicts itself or an earlier one."""


class CorruptedError(PermanentError):
    """The content of a file does not match its format or its checksum."""


class EmptyFileError(CorruptedError):
    """A file that must have content is empty."""


class RetryableError(RankdumpError):
    """The same input may succeed later."""


class ResendError(RetryableError):
    """Frames are missing or damaged and must be sent again."""


class UnavailableError(RetryableError):
    """The other side does not answer, or is shutting down."""


class ExhaustedError(RetryableError):
    """Memory, disk space or file descriptors are used up."""
