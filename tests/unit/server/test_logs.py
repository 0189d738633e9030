"""Log lines for people, programs and journald, and the keys of `extra=`."""

from __future__ import annotations

import ast
import json
import logging
from pathlib import Path

import rankdumpd
from rankdump.errors import ConfigError
from rankdumpd.server.logs import LOG_KEYS, RecentTexts, build_formatter
from rankdumpd.settings import LogSettings

ROOT = Path(rankdumpd.__file__).parent


def record(**extra: object) -> logging.LogRecord:
    try:
        raise ConfigError("f", "k", 1, "2")
    except ConfigError as error:
        made = logging.LogRecord(
            "a.b", logging.ERROR, "p", 1, "job %s", ("j",), (type(error), error, None)
        )
    made.__dict__.update(extra)
    return made


def test_json_log_line_has_fields_of_session():
    text = build_formatter(LogSettings(format="json"), who="worker 1 ", journal=False).format(
        record(job="j", rank=3, colour="red")
    )
    found = json.loads(text)
    assert "\n" not in text
    assert found["level"] == "error"
    assert found["message"] == "job j"
    assert (found["job"], found["rank"], found["who"]) == ("j", 3, "worker 1")
    assert "ConfigError" in found["traceback"]
    assert found["time"].endswith("Z")
    assert "colour" not in found


def test_journal_log_line_has_priority():
    text = build_formatter(LogSettings(), who="", journal=True).format(record())
    assert all(line.startswith("<3>") for line in text.split("\n"))
    assert "ERROR a.b: job j" in text


def keys_of(value: ast.expr, text: str, path: Path) -> set[str]:
    if isinstance(value, ast.Name):
        # A local name: the dictionary stands in a line before.
        assigned = [
            node.value
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == value.id
            if isinstance(node.value, ast.Dict)
        ]
        assert assigned, f"{path}: {value.id}"
        return {key for each in assigned for key in keys_of(each, text, path)}
    if isinstance(value, ast.Call):
        assert ast.unparse(value.func) == "build_log_fields", path
        return {keyword.arg or "" for keyword in value.keywords}
    assert isinstance(value, ast.Dict), f"{path}: {ast.unparse(value)}"
    return {ast.literal_eval(key) for key in value.keys if key}


def test_extra_uses_only_log_keys():
    """Law: programs that read logs can know every key."""
    used = {"job", "rank", "session"}
    for path in ROOT.rglob("*.py"):
        text = path.read_text()
        if "extra=" not in text and "log_about(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call):
                continue
            function = ast.unparse(node.func).lower()
            if function == "log_about":
                used |= {keyword.arg or "" for keyword in node.keywords}
            if function.startswith("_logger."):
                for keyword in node.keywords:
                    if keyword.arg == "extra":
                        used |= keys_of(keyword.value, text, path)
    assert used == set(LOG_KEYS)


def test_recent_text_needs_a_line_again_when_its_time_is_over():
    """However often it comes meanwhile: a worker that is restarted again is a new line."""
    now_s = 0.0
    recent = RecentTexts(10.0, clock=lambda: now_s)
    assert [recent.is_new("a"), recent.is_new("b"), recent.is_new("a")] == [True, True, False]
    now_s = 9.0
    assert not recent.is_new("a")
    now_s = 10.0
    assert [recent.is_new("a"), recent.is_new("a")] == [True, False]
