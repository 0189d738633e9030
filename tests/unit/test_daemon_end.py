"""How a daemon ends: what it tells of an error, its exit status, and a signal at its start."""

from __future__ import annotations

import logging
import signal

import pytest
from click.testing import CliRunner

from rankdump.errors import ConfigError, UnavailableError
from rankdumpd import main as main_module
from rankdumpd.__main__ import run


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


@pytest.mark.parametrize(("command", "ignores"), [("agent", True), ("ingest", False)])
def test_hangup_during_the_start_of_a_daemon_is_ignored(
    monkeypatch: pytest.MonkeyPatch, command: str, ignores: bool
):
    """Before there is anything to reload. A command of a terminal ends with it."""
    seen: list[object] = []

    def look(**_: object) -> None:
        seen.append(signal.getsignal(signal.SIGHUP))

    monkeypatch.setattr(main_module, "main", look)
    monkeypatch.setattr("sys.argv", ["rankdumpd", command])
    earlier = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        run()
    finally:
        signal.signal(signal.SIGHUP, earlier)
    assert seen == [signal.SIG_IGN if ignores else signal.SIG_DFL]
