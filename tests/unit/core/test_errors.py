"""The tree of errors: permanent or retryable, with messages that name the wrong value."""

from __future__ import annotations

import inspect
import pickle

import pytest

from rankdump import errors
from rankdump.errors import (
    MISSING_VALUE,
    ConfigError,
    PermanentError,
    RankdumpError,
    RetryableError,
    UnknownKey,
)

CLASSES = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, BaseException) and kind is not RankdumpError
]


@pytest.mark.parametrize("kind", CLASSES)
def test_errors_are_either_permanent_or_retryable(kind: type[BaseException]):
    """Every error is either permanent or retryable, never both."""
    assert issubclass(kind, RankdumpError)
    assert issubclass(kind, PermanentError) is not issubclass(kind, RetryableError)


@pytest.mark.parametrize("kind", CLASSES)
def test_error_tree_in_the_docstring_names_every_class(kind: type[BaseException]):
    """The tree drawn in the module's docstring names every class."""
    assert errors.__doc__ is not None
    assert kind.__name__ in errors.__doc__


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            ConfigError("a.json", "input_output", 7, "0, 1 or 2"),
            "a.json: input_output: 7 is not allowed; allowed: 0, 1 or 2",
        ),
        (
            ConfigError("a.json", "path", "x\ny", "a folder"),
            r"a.json: path: 'x\ny' is not allowed; allowed: a folder",
        ),
        (
            ConfigError("a.json", "path", MISSING_VALUE, "a folder"),
            "a.json: path: missing; allowed: a folder",
        ),
        (
            ConfigError("a.json", "pth", UnknownKey("path"), "path, size"),
            "a.json: pth: unknown key; nearest: path; allowed: path, size",
        ),
        (ConfigError("a.json", "", None, "JSON"), "a.json: None is not allowed; allowed: JSON"),
    ],
)
def test_config_error_is_one_line_with_file_key_and_value(error: ConfigError, line: str):
    """One line with file, key, value and what is allowed."""
    assert str(error) == line


def test_config_error_can_be_pickled():
    """An error raised in a worker arrives whole."""
    error = ConfigError("a.json", "key", 7, "0")
    back = pickle.loads(pickle.dumps(error))
    assert str(back) == str(error)
    assert (back.file, back.key, back.value, back.allowed) == ("a.json", "key", 7, "0")
