"""What an operator writes about a process: one TOML file and RANKDUMPD_<SECTION>__<KEY> variables.

The only place that reads either; everything else is handed the values it needs.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rankdump.contract.errors import ConfigError

_toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

ENVIRONMENT_PREFIX = "RANKDUMPD_"
_MIB = 1 << 20
_GIB = 1 << 30


def _required(key: str, value: str) -> None:
    if not value:
        raise ConfigError("settings", key, value, "unix:/path or host:port")


def _absolute(key: str, folder: str) -> None:
    if not Path(folder).is_absolute():
        raise ConfigError("settings", key, folder, "an absolute folder")


def _between(key: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError("settings", key, value, f"{low} to {high}")


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """The agent of one host."""

    listen: str = "unix:/run/rankdump/agent.sock"
    """Where ranks and people reach it: `unix:/path`, or `host:port` on loopback."""
    coordinator: str = ""
    """Where the coordinator of the job listens; empty when there is none."""
    state_dir: str = "/var/lib/rankdump"
    """Folder of the ledger; absolute."""
    workers: int = 1
    """Processes that ranks are shared out to; what follows in bytes and threads is for all."""
    encode_threads: int = 0
    """Threads that compress and write; 0 means one for each core this process may use."""
    nice: int = 10
    """How far other processes go first, 0 to 19: ranks have the cores when they want them."""
    queue_bytes: int = 512 * _MIB
    """Tensor bytes taken in but not yet written and committed."""
    slab_bytes: int = 256 * _MIB
    """Largest shared memory of one rank; 0 means none, and its frames travel on the stream."""
    memory_bytes: int = 0
    """What queue, slabs and sessions stay under together; 0 means half of the memory there is."""
    runtime_dir: str = ""
    """Folder of the shared memory, absolute and on tmpfs; empty means beside the socket."""
    runtime_group: str = ""
    """Group that may map it; empty means the group of this process."""
    max_record_bytes: int = 16 * _GIB
    """Largest tensor that is taken."""
    report_bytes: int = 1 * _GIB
    """What is kept on disk until the coordinator has it; beyond it the oldest events are lost."""
    keep_free_bytes: int = 64 * _MIB
    """Tensors are refused rather than leave less than this on their disk."""
    drain_timeout_s: float = 30.0
    """Longest time a stopping agent gives ranks and its own queue; ranks get half of it."""

    def __post_init__(self) -> None:
        _required("agent.listen", self.listen)
        _absolute("agent.state_dir", self.state_dir)
        _between("agent.workers", self.workers, 1, 256)
        _between("agent.encode_threads", self.encode_threads, 0, 1024)
        _between("agent.nice", self.nice, 0, 19)
        _between("agent.queue_bytes", self.queue_bytes, self.workers * _MIB, 1 << 50)
        _between("agent.slab_bytes", self.slab_bytes, 0, 1 << 50)
        if self.memory_bytes:
            _between("agent.memory_bytes", self.memory_bytes, self.queue_bytes, 1 << 50)
        if self.runtime_dir:
            _absolute("agent.runtime_dir", self.runtime_dir)
        _between("agent.max_record_bytes", self.max_record_bytes, 1, 1 << 50)
        _between("agent.report_bytes", self.report_bytes, self.workers * _MIB, 1 << 50)
        _between("agent.keep_free_bytes", self.keep_free_bytes, 0, 1 << 60)
        _between("agent.drain_timeout_s", self.drain_timeout_s, 0, 86_400)


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """The coordinator of a job."""

    listen: str = "127.0.0.1:7421"
    """Where agents and people reach it: `unix:/path`, or `host:port` on loopback."""
    state_dir: str = "/var/lib/rankdump"
    """Folder of what survives it; absolute, and it may be the agent's."""
    deadline_s: float = 300.0
    """An iteration of which nothing came for so long is merged without the ranks that miss."""
    table_events: int = 1_000_000_000
    """Iterations with more events get no Parquet table; none do without pyarrow."""
    trace_events: int = 1_000_000
    """Iterations with more events get no trace: no viewer opens one of that size."""
    keep_days: float = 30.0
    """What is known of a finished job is forgotten then; its tree stays."""
    keep_bytes: int = _GIB
    """The same, oldest first, when what is known of all jobs takes more."""

    def __post_init__(self) -> None:
        _required("coordinator.listen", self.listen)
        _absolute("coordinator.state_dir", self.state_dir)
        _between("coordinator.deadline_s", self.deadline_s, 0, 86_400)
        _between("coordinator.table_events", self.table_events, 0, 1 << 40)
        _between("coordinator.trace_events", self.trace_events, 0, 1 << 40)
        _between("coordinator.keep_days", self.keep_days, 0, 36_500)
        _between("coordinator.keep_bytes", self.keep_bytes, _MIB, 1 << 50)


@dataclass(frozen=True, slots=True)
class Settings:
    """Both processes; each reads its own section."""

    agent: AgentSettings = AgentSettings()
    coordinator: CoordinatorSettings = CoordinatorSettings()

    def lines(self) -> list[str]:
        """Return the resolved settings as the lines of a TOML file."""
        found: list[str] = []
        for section in dataclasses.fields(self):
            values = getattr(self, section.name)
            found.append(f"[{section.name}]")
            found += [
                f"{f.name} = {_shown(getattr(values, f.name))}" for f in dataclasses.fields(values)
            ]
        return found


_DEFAULTS = {"agent": AgentSettings(), "coordinator": CoordinatorSettings()}


def environment(settings: AgentSettings) -> dict[str, str]:
    """Return the variables that give another process exactly these settings."""
    return {
        _variable("agent", field.name): str(getattr(settings, field.name))
        for field in dataclasses.fields(settings)
    }


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment that sets nothing."""
    return {name: value for name, value in environ.items() if not _is_ours(name)}


def load(path: Path | None, environ: Mapping[str, str]) -> Settings:
    """Return the settings of a file and an environment; ConfigError names the key at fault."""
    source = str(path) if path else "environment"
    tables = _tables(path)
    _check_names(source, "", tables, [f.name for f in dataclasses.fields(Settings)])
    _check_environment(environ)
    try:
        return Settings(
            agent=AgentSettings(**_values("agent", source, tables, environ)),
            coordinator=CoordinatorSettings(**_values("coordinator", source, tables, environ)),
        )
    except ConfigError as error:
        where = source if error.file == "settings" else error.file
        raise ConfigError(where, error.key, error.value, error.allowed) from None


def _tables(path: Path | None) -> dict[str, object]:
    if path is None:
        return {}
    try:
        with path.open("rb") as file:
            return _toml.load(file)
    except OSError as error:
        raise ConfigError(str(path), "", error.strerror, "a file that can be read") from None
    except ValueError as error:
        raise ConfigError(str(path), "", str(error), "TOML") from None


def _values(
    section: str, source: str, tables: Mapping[str, object], environ: Mapping[str, str]
) -> dict[str, Any]:
    defaults = _DEFAULTS[section]
    table = tables.get(section, {})
    if not isinstance(table, dict):
        raise ConfigError(source, section, table, "a table")
    given = cast("dict[str, object]", table)
    known = {field.name: getattr(defaults, field.name) for field in dataclasses.fields(defaults)}
    _check_names(source, f"{section}.", given, known)
    values = {
        key: _typed(source, f"{section}.{key}", value, known[key]) for key, value in given.items()
    }
    for key, default in known.items():
        variable = _variable(section, key)
        if variable in environ:
            values[key] = _parsed(variable, environ[variable], default)
    return values


def _typed(source: str, key: str, value: object, default: object) -> object:
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not type(default):
        raise ConfigError(source, key, value, f"a value of type {type(default).__name__}")
    return value


def _parsed(variable: str, text: str, default: object) -> object:
    if isinstance(default, str):
        return text
    kind = type(default)
    try:
        return float(text) if kind is float else int(text)
    except ValueError:
        raise ConfigError("environment", variable, text, f"type {kind.__name__}") from None


def _check_environment(environ: Mapping[str, str]) -> None:
    known = [
        _variable(section, field.name)
        for section, defaults in _DEFAULTS.items()
        for field in dataclasses.fields(defaults)
    ]
    _check_names("environment", "", dict.fromkeys(filter(_is_ours, environ), ""), known)


def _variable(section: str, key: str) -> str:
    return f"{ENVIRONMENT_PREFIX}{section}__{key}".upper()


def _is_ours(name: str) -> bool:
    return name.startswith(ENVIRONMENT_PREFIX) and "__" in name


def _check_names(
    source: str, prefix: str, given: Mapping[str, object], known: Iterable[str]
) -> None:
    names = list(known)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0)
            raise ConfigError(
                source, f"{prefix}{name}", "unknown key", f"{', '.join(names)}; nearest: {near[0]}"
            )


def _shown(value: object) -> str:
    # JSON's text is a TOML basic string too.
    return json.dumps(value) if isinstance(value, str) else str(value)
