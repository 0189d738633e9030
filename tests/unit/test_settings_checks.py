"""Settings with which a daemon would not start: at a start, with --check-config, at a reload."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rankdump.errors import ConfigError
from rankdumpd import main as main_module
from rankdumpd.server.lifecycle import SettingsReader
from rankdumpd.settings import DaemonSettings

OPEN = "host:port on loopback, or any host:port with certificates ([tls])"
INVALID = [
    ("agent", '[agent]\nlisten = "0.0.0.0:7000"\n', f"agent.listen: '0.0.0.0:7000' is not.*{OPEN}"),
    ("agent", '[agent]\nlisten = "unix:rel.sock"\n', "agent.listen: .*absolute socket path"),
    ("agent", '[agent]\nlisten = "/run/a.sock"\n', "agent.listen: .*unix:/path"),
    ("agent", '[agent]\nlisten = "127.0.0.1:99999"\n', "agent.listen: .*host:port"),
    ("agent", f'[agent]\nlisten = "unix:/{"x" * 107}"\n', "agent.listen: .*at most 107 bytes"),
    (
        "agent",
        f'[agent]\nlisten = "unix:/{"x" * 106}"\nworkers = 2\n',
        "agent.listen: .*at most 107 bytes",
    ),
    ("agent", '[agent]\nruntime_group = "nosuch"\n', "agent.runtime_group: 'nosuch'.*of this host"),
    ("coordinator", '[agent]\nruntime_group = "nosuch"\n', "agent.runtime_group: 'nosuch'"),
    ("agent", '[metrics]\nlisten = "9000"\n', "metrics.listen: '9000'"),
    ("coordinator", '[metrics]\nlisten = "0.0.0.0:9000"\n', "metrics.listen: .*with certificates"),
    ("coordinator", '[coordinator]\nlisten = "10.0.0.1:1"\n', "coordinator.listen: '10.0.0.1:1'"),
    ("standalone", '[agent]\nlisten = "10.0.0.1:1"\n', "agent.listen: '10.0.0.1:1'"),
    (
        "agent",
        '[agent]\ningest_dir = "/nowhere/a"\ningest_into = "/nowhere/a/b"\n',
        "agent.ingest_into: '/nowhere/a/b'.*that is not in",
    ),
    (
        "agent",
        '[agent]\ningest_dir = "/nowhere/a"\ningest_into = "/nowhere/b"\nroots = "/data"\n',
        "agent.ingest_into: '/nowhere/b'.*outside of /data",
    ),
]


def invoke(*arguments: str, **environ: str) -> Result:
    return CliRunner().invoke(main_module.main, arguments, env=environ)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rankdumpd.toml"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Sequence[SettingsReader]:
    """Agents that were started, as their readers of settings."""
    readers: list[SettingsReader] = []

    def serve(_settings: DaemonSettings, reread: SettingsReader, _pipe: object) -> int:
        readers.append(reread)
        return 0

    monkeypatch.setattr(main_module, "serve_agent", serve)
    return readers


@pytest.mark.parametrize(("command", "text", "says"), INVALID)
def test_check_config_rejects_what_a_start_rejects(file: Path, command: str, text: str, says: str):
    """Status 2, and one line with the file and the setting, as at a start."""
    file.write_text(text)
    checked = invoke(command, "--config", str(file), "--check-config")
    started = invoke(command, "--config", str(file))
    assert (checked.exit_code, checked.stdout) == (2, "")
    assert checked.stderr == started.stderr
    assert started.exit_code == 2
    (line,) = checked.stderr.splitlines()
    assert line.startswith(f"rankdumpd: {file}: ")
    assert all(part in line for part in says.split(".*")), line


def test_error_names_the_environment_where_the_value_comes_from_there(file: Path):
    file.write_text('[agent]\nlisten = "unix:/run/a.sock"\n')
    done = invoke(
        "agent", "--config", str(file), "--check-config", RANKDUMPD_AGENT__LISTEN="unix:a"
    )
    assert done.stderr.startswith("rankdumpd: environment: agent.listen: 'unix:a'")


def test_ignored_variable_is_told(file: Path):
    file.write_text('[agent]\nlisten = "unix:/a/a.sock"\n')
    done = invoke("agent", "--config", str(file), "--check-config", RANKDUMPD_AGENT_WORKERS="2")
    assert done.exit_code == 1
    assert done.stderr.startswith("rankdumpd: the variable RANKDUMPD_AGENT_WORKERS is ignored, ")


def test_other_sections_are_not_checked(file: Path):
    """A file may serve agents and the coordinator of a host."""
    file.write_text('[coordinator]\nlisten = "10.0.0.1:1"\n[agent]\nlisten = "unix:/a/a.sock"\n')
    assert invoke("agent", "--config", str(file), "--check-config").exit_code == 0


def test_reload_rejects_what_a_start_rejects(file: Path, started: Sequence[SettingsReader]):
    file.write_text('[agent]\nlisten = "unix:/run/a.sock"\n')
    assert invoke("agent", "--config", str(file)).exit_code == 0
    (reread,) = started
    file.write_text('[metrics]\nlisten = "0.0.0.0:9000"\n')
    with pytest.raises(ConfigError, match=r"rankdumpd.toml: metrics\.listen"):
        reread({})
