"""What a daemon tells of the error that ends it, and its exit status."""

from __future__ import annotations

import logging

import pytest
from click.testing import CliRunner

from rankdump.errors import ConfigError, UnavailableError
from rankdumpd import main as main_module


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (UnavailableError("in use"), 1, "in use"),
        (ConfigError("settings", "log.audit", "/a", "a file"), 2, "environment: log.audit: "),
        (RuntimeError("odd"), 1, "an unexpected error ends this process"),
    ],
)
def test_error_that_ends_a_daemon_is_logged(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    status: int,
    said: str,
):
    """Also an unexpected one, with its traceback."""

    def serve(*_: object) -> int:
        raise error

    monkeypatch.setattr(main_module, "serve_coordinator", serve)
    done = CliRunner().invoke(main_module.main, ["coordinator"])
    assert done.exit_code == status
    (record,) = [each for each in caplog.records if each.levelno == logging.CRITICAL]
    assert record.getMessage().startswith(said)
    assert bool(record.exc_info) is isinstance(error, RuntimeError)
