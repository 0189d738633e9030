"""Settings from a file and the environment, and errors that name the key."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rankdump.errors import ConfigError
from rankdumpd.settings import DaemonSettings, describe_ignored_variables, load_settings


def test_settings_default_without_file_and_environment():
    assert load_settings(None, {"PATH": "x"}) == DaemonSettings()


def test_settings_from_environment_override_file(tmp_path: Path):
    path = tmp_path / "a.toml"
    path.write_text("[agent]\nworkers = 3\nqueue_bytes = 8388608\n[coordinator]\ndeadline_s = 5\n")
    settings = load_settings(
        path, {"RANKDUMPD_AGENT__WORKERS": "4", "RANKDUMPD_AGENT__LISTEN": "unix:/s"}
    )
    expected = dataclasses.replace(
        DaemonSettings().agent, workers=4, queue_bytes=8388608, listen="unix:/s"
    )
    assert settings.agent == expected
    assert settings.coordinator.deadline_s == 5.0


@pytest.mark.parametrize(
    ("text", "environ", "says"),
    [
        (
            "[agent]\nqueue_byte = 1\n",
            {},
            ("agent.queue_byte: unknown key; nearest: queue_bytes; allowed: ",),
        ),
        ("[agnet]\n", {}, ("agnet: unknown key; nearest: agent; ",)),
        ("agent = 1\n", {}, ("agent: 1", "a table")),
        ("[agent]\nworkers = true\n", {}, ("agent.workers", "an integer")),
        ("[agent]\nworkers = 1.5\n", {}, ("agent.workers", "an integer")),
        ("[agent]\nworkers = 0\n", {}, ("agent.workers", "1 to 256")),
        ("[agent]\nencode_threads = -1\n", {}, ("agent.encode_threads", "0 to 1024")),
        ("[agent]\nworkers = 2\nqueue_bytes = 2000000\n", {}, ("agent.queue_bytes", "2097152")),
        ("[agent]\nlisten = 7\n", {}, ("agent.listen", "a string")),
        ('[agent]\nlisten = ""\n', {}, ("agent.listen", "unix:/path")),
        ('[agent]\nstate_dir = "x"\n', {}, ("agent.state_dir", "absolute")),
        ("[agent]\nqueue_bytes = 1\n", {}, ("agent.queue_bytes", "1048576")),
        ("[agent]\nmemory_bytes = 1\n", {}, ("agent.memory_bytes", "536870912")),
        ("[agent]\nslab_bytes = -1\n", {}, ("agent.slab_bytes", "0 to")),
        ('[agent]\nruntime_dir = "x"\n', {}, ("agent.runtime_dir", "absolute")),
        ("[agent]\ndrain_timeout_s = nan\n", {}, ("agent.drain_timeout_s", "nan")),
        ("[agent\n", {}, ("a.toml", "TOML")),
        ("", {"RANKDUMPD_AGENT__WORKERS": "two"}, ("RANKDUMPD_AGENT__WORKERS", "'two'")),
        ("", {"RANKDUMPD_AGENT__WORKER": "2"}, ("nearest: RANKDUMPD_AGENT__WORKERS",)),
    ],
)
def test_settings_errors_name_key_and_allowed_values(tmp_path: Path, text, environ, says):
    """Every error is one line."""
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_settings(path, environ)
    assert all(part in str(refused.value) for part in says), refused.value
    assert "\n" not in str(refused.value)


def test_variables_that_look_like_settings_are_told():
    """Names with `__` are errors; others could be made by Kubernetes."""
    environ = {"RANKDUMPD_AGENT_WORKERS": "4", "RANKDUMPD_AGENT__NICE": "1", "RANKDUMP_AGENT": "x"}
    assert load_settings(None, environ).agent.workers == 1
    assert describe_ignored_variables(environ) == [
        "the variable RANKDUMPD_AGENT_WORKERS is ignored, as no setting has it; nearest: "
        "RANKDUMPD_AGENT__WORKERS"
    ]


def test_missing_settings_file_is_an_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="No such file"):
        load_settings(tmp_path / "none.toml", {})


def test_printed_settings_round_trip(tmp_path: Path):
    """The output of --check-config is a file with the same settings."""
    first = load_settings(None, {"RANKDUMPD_AGENT__STATE_DIR": '/a "b" \\c'})
    path = tmp_path / "a.toml"
    path.write_text("\n".join(first.lines()))
    assert load_settings(path, {}) == first


def test_sample_settings_file_has_every_key_with_default():
    """The file is in deploy/."""
    sample = Path(__file__).parents[2] / "deploy" / "rankdumpd.toml"
    assert load_settings(sample, {}) == DaemonSettings()
    shown = [line for line in sample.read_text().splitlines() if line and line[0] != "#"]
    assert [line.split(" = ")[0] for line in shown] == [
        line.split(" = ")[0] for line in DaemonSettings().lines()
    ]
