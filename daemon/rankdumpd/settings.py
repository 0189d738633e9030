"""Settings of all daemon processes with their defaults and limits: one TOML file, variables
RANKDUMPD_<SECTION>__<KEY>, and which settings may change while a process runs.

Only this module reads the file and the variables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import json
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast, get_type_hints

from rankdump.errors import ConfigError, UnknownKey

_toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

ENVIRONMENT_PREFIX = "RANKDUMPD_"
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
_ENVIRONMENT = "environment"
_TRUTH_VALUES = {"true": True, "false": False}
_MIB = 1 << 20
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """Certificates; without any, TCP is allowed on loopback only."""

    ca: str = ""
    """File of the trusted authorities, PEM, absolute path."""
    certificate: str = ""
    """File of the certificate of this daemon, PEM, absolute path."""
    key: str = ""
    """File of the private key of that certificate, PEM, absolute path."""
    revoked: str = ""
    """File of revoked certificates, a fingerprint a line, absolute path; empty: none."""

    def __post_init__(self) -> None:
        given = {"ca": self.ca, "certificate": self.certificate, "key": self.key}
        if any(given.values()) or self.revoked:
            for name, path in given.items():
                _check_absolute_path(f"tls.{name}", path)
        if self.revoked:
            _check_absolute_path("tls.revoked", self.revoked)

    @property
    def on(self) -> bool:
        """Whether there are certificates."""
        return bool(self.certificate)


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """Metrics and health over HTTP."""

    listen: str = ""
    """Address of /metrics for Prometheus and /health, `host:port`; empty: none."""


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Log on standard error, and audit log."""

    format: str = "text"
    """`text` for people, or `json`: an object a line."""
    level: str = "info"
    """`debug`, `info`, `warning` or `error`."""
    audit: str = ""
    """File of the audit log, a JSON object a line, absolute path; empty: none."""

    def __post_init__(self) -> None:
        _check_choice("log.format", self.format, LOG_FORMATS)
        _check_choice("log.level", self.level, LOG_LEVELS)
        if self.audit:
            _check_absolute_path("log.audit", self.audit)


def _check_absolute_path(key: str, path: str, allowed: str = "an absolute path") -> None:
    if not Path(path).is_absolute():
        raise ConfigError("settings", key, path, allowed)


def _check_choice(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError("settings", key, value, ", ".join(allowed))


def _check_required(key: str, value: str) -> None:
    if not value:
        raise ConfigError("settings", key, value, "unix:/path or host:port")


def _check_absolute_folder(key: str, folder: str) -> None:
    _check_absolute_path(key, folder, "an absolute folder")


def _check_folders(key: str, joined: str) -> None:
    for folder in joined.split(":") if joined else ():
        _check_absolute_folder(key, folder)


class ValueRange(NamedTuple):
    """Least and greatest value of a setting."""

    low: float
    high: float


def _check_ranges(section: str, settings: object) -> None:
    for name, low, high in _list_ranges(type(settings)):
        _check_range(f"{section}.{name}", getattr(settings, name), low, high)


@cache
def _list_ranges(section: type) -> tuple[tuple[str, float, float], ...]:
    """Return the names of all settings that have a range, with its ends."""
    hints = get_type_hints(section, include_extras=True)
    return tuple(
        (name, *limits)
        for name, hint in hints.items()
        for limits in getattr(hint, "__metadata__", ())
    )


def _check_range(key: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError("settings", key, value, f"{low} to {high}")


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """The agent of one host."""

    listen: str = "unix:/run/rankdump/agent.sock"
    """Address of the agent, `unix:/path` or `host:port`; addresses beyond loopback need [tls]."""
    coordinator: str = ""
    """Address of the coordinator of the job; empty: no coordinator."""
    state_dir: str = "/var/lib/rankdump"
    """Folder of the ledger, absolute path."""
    workers: Annotated[int, ValueRange(1, 256)] = 1
    """Worker processes; ranks are distributed over them, limits below are for all together."""
    encode_threads: Annotated[int, ValueRange(0, 1024)] = 0
    """Threads that compress and write; 0: one for each core that the process may use."""
    nice: Annotated[int, ValueRange(0, 19)] = 10
    """Niceness of the process, 0 to 19: training processes get the cores first."""
    queue_bytes: int = 512 * _MIB
    """Folder of the ledger, absolute path."""
    slab_bytes: Annotated[int, ValueRange(0, 1 << 50)] = 256 * _MIB
    """Largest shared memory of one rank; 0: none, and frames travel on the gRPC stream."""
    memory_bytes: int = 0
    """Limit of queue, shared memory and sessions together; 0: half of the memory."""
    runtime_dir: str = ""
    """Folder of the shared memory, absolute path on tmpfs; empty: the folder of the socket."""
    runtime_group: str = ""
    """Group that may use socket and shared memory; empty: the group of this process."""
    max_record_bytes: Annotated[int, ValueRange(1, 1 << 50)] = 16 * _GIB
    """Largest tensor that the agent accepts."""
    report_bytes: int = 1 * _GIB
    """Most disk space for events that the coordinator lacks; beyond it the oldest are lost."""
    roots: str = ""
    """Folders in which dump trees may be, absolute paths joined by colons; empty: anywhere."""
    max_sessions: Annotated[int, ValueRange(1, 1 << 20)] = 4096
    """Most open sessions, with those whose rank never connected."""
    keep_free_bytes: Annotated[int, ValueRange(0, 1 << 60)] = 64 * _MIB
    """Free space of a disk below which tensors are dropped."""
    keep_free_ratio: Annotated[float, ValueRange(0, 0.99)] = 0.1
    """The same as a share of the disk; the larger of both applies."""
    keep_free_inodes_ratio: Annotated[float, ValueRange(0, 0.99)] = 0.01
    """Share of free inodes of a disk below which tensors are dropped."""
    disk_bytes: Annotated[int, ValueRange(0, 1 << 60)] = 0
    """Most disk space for all dumps of this agent together; 0: no limit."""
    job_bytes: Annotated[int, ValueRange(0, 1 << 60)] = 0
    """Most disk space for the dump of one job on this host; 0: no limit."""
    retain_days: Annotated[float, ValueRange(0, 36_500)] = 0.0
    """Age at which iterations are removed; 0: never."""
    retain_bytes: Annotated[int, ValueRange(0, 1 << 60)] = 0
    """Size of all dumps beyond which iterations are removed, oldest first; 0: never."""
    ingest_dir: str = ""
    """Folder of dumps by MindSpore or CANN to ingest, absolute path; empty: none."""
    ingest_into: str = ""
    """Dump tree that they are ingested into, absolute path outside of that folder."""
    ingest_delete: bool = False
    """Whether each tensor is removed from that folder once its copy is committed."""
    table: bool = True
    """Most disk space for the dump of one job on this host; 0: no limit."""
    drain_timeout_s: Annotated[float, ValueRange(0, 86_400)] = 30.0
    """Age at which iterations are removed; 0: never."""

    def __post_init__(self) -> None:
        _check_ranges("agent", self)
        _check_required("agent.listen", self.listen)
        _check_absolute_folder("agent.state_dir", self.state_dir)
        _check_range("agent.queue_bytes", self.queue_bytes, self.workers * _MIB, 1 << 50)
        if self.memory_bytes:
            _check_range("agent.memory_bytes", self.memory_bytes, self.queue_bytes, 1 << 50)
        if self.runtime_dir:
            _check_absolute_folder("agent.runtime_dir", self.runtime_dir)
        _check_range("agent.report_bytes", self.report_bytes, self.workers * _MIB, 1 << 50)
        _check_folders("agent.roots", self.roots)
        if self.ingest_dir or self.ingest_into or self.ingest_delete:
            _check_absolute_folder("agent.ingest_dir", self.ingest_dir)
            _check_absolute_folder("agent.ingest_into", self.ingest_into)


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """The coordinator of jobs."""

    listen: str = "127.0.0.1:7421"
    """Address of the coordinator, `unix:/path` or `host:port`; beyond loopback it needs [tls]."""
    state_dir: str = "/var/lib/rankdump"
    """Folder of the coordinator's state, absolute path; may be the agent's."""
    roots: str = ""
    """Folders in which dump trees may be, absolute paths joined by colons; empty: anywhere."""
    deadline_s: Annotated[float, ValueRange(0, 86_400)] = 300.0
    """Time without reports after which an iteration is merged without its missing ranks."""
    table_events: Annotated[int, ValueRange(0, 1 << 40)] = 1_000_000_000
    """Most events of an iteration for a Parquet table; tables need pyarrow."""
    trace_events: Annotated[int, ValueRange(0, 1 << 40)] = 1_000_000
    """Most events of an iteration for a trace; viewers cannot open larger ones."""
    keep_days: Annotated[float, ValueRange(0, 36_500)] = 30.0
    """Age at which the state of a finished job is removed; its tree stays."""
    keep_bytes: Annotated[int, ValueRange(_MIB, 1 << 50)] = _GIB
    """Size of the state of all jobs beyond which finished ones are removed, oldest first."""
    pages: bool = False
    """Whether trees of jobs are shown as pages at metrics.listen; needs [tls] and the extra web."""

    def __post_init__(self) -> None:
        _check_ranges("coordinator", self)
        _check_required("coordinator.listen", self.listen)
        _check_absolute_folder("coordinator.state_dir", self.state_dir)
        _check_folders("coordinator.roots", self.roots)


@dataclass(frozen=True, slots=True)
class DaemonSettings:
    """Whether trees of jobs are shown as pages at metrics.listen; needs [tls] and the extra web."""

    agent: AgentSettings = field(default_factory=AgentSettings)
    coordinator: CoordinatorSettings = field(default_factory=CoordinatorSettings)
    tls: TlsSettings = field(default_factory=TlsSettings)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    log: LogSettings = field(default_factory=LogSettings)

    def __post_init__(self) -> None:
        if self.coordinator.pages and not (self.metrics.listen and self.tls.on):
            allowed = "false without metrics.listen and [tls]: pages show tensors"
            raise ConfigError("settings", "coordinator.pages", "true", allowed)

    def lines(self) -> list[str]:
        """Return the resolved settings as the lines of a TOML file."""
        lines: list[str] = []
        for section in dataclasses.fields(self):
            values = getattr(self, section.name)
            lines.append(f"[{section.name}]")
            lines += [
                f"{f.name} = {_format_value(getattr(values, f.name))}"
                for f in dataclasses.fields(values)
            ]
        return lines


_SECTIONS: dict[str, type[Any]] = get_type_hints(DaemonSettings)
_WORKER_SECTIONS = ("agent", "tls", "log")
"""Sections that the workers of an agent receive from their supervisor."""


def build_environment(settings: DaemonSettings) -> dict[str, str]:
    """Return the variables that give a worker of an agent exactly these settings."""
    return {
        _build_variable_name(section, field.name): str(
            getattr(getattr(settings, section), field.name)
        )
        for section in _WORKER_SECTIONS
        for field in dataclasses.fields(_SECTIONS[section])
    }


def strip_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables of settings."""
    return {name: value for name, value in environ.items() if not _is_own_variable(name)}


def load_settings(path: Path | None, environ: Mapping[str, str]) -> DaemonSettings:
    """Return the settings of a file and an environment; ConfigError names the key at fault."""
    source = str(path) if path else _ENVIRONMENT
    tables = _read_tables(path)
    _check_names(source, "", tables, _SECTIONS)
    _check_environment(environ)
    with name_source(path, environ):
        return DaemonSettings(
            **{
                name: section(**_read_values(name, source, tables, environ))
                for name, section in _SECTIONS.items()
            }
        )


@contextlib.contextmanager
def name_source(path: Path | None, environ: Mapping[str, str]) -> Generator[None]:
    """Name the file or the environment in a ConfigError about a setting that comes from there."""
    try:
        yield
    except ConfigError as error:
        if error.file != "settings":
            raise
        variable = _build_variable_name(*error.key.partition(".")[::2])
        where = str(path) if path and variable not in environ else _ENVIRONMENT
        raise ConfigError(where, error.key, error.value, error.allowed) from None


def _read_tables(path: Path | None) -> dict[str, object]:
    if path is None:
        return {}
    try:
        with path.open("rb") as file:
            return _toml.load(file)
    except OSError as error:
        raise ConfigError(str(path), "", error.strerror, "a file that can be read") from None
    except ValueError as error:
        raise ConfigError(str(path), "", str(error), "TOML") from None


def _read_values(
    section: str, source: str, tables: Mapping[str, object], environ: Mapping[str, str]
) -> dict[str, Any]:
    defaults = _SECTIONS[section]()
    table = tables.get(section, {})
    if not isinstance(table, dict):
        raise ConfigError(source, section, table, "a table")
    given = cast("dict[str, object]", table)
    known = {field.name: getattr(defaults, field.name) for field in dataclasses.fields(defaults)}
    _check_names(source, f"{section}.", given, known)
    values = {
        key: _check_type(source, f"{section}.{key}", value, known[key])
        for key, value in given.items()
    }
    for key, default in known.items():
        variable = _build_variable_name(section, key)
        if variable in environ:
            values[key] = _parse_variable(variable, environ[variable], default)
    return values


_TYPE_NAMES: Mapping[type, str] = {
    str: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a number",
}


def _check_type(source: str, key: str, value: object, default: object) -> object:
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not type(default):
        raise ConfigError(source, key, value, _TYPE_NAMES[type(default)])
    return value


def _parse_variable(variable: str, text: str, default: object) -> object:
    if isinstance(default, str):
        return text
    kind = type(default)
    try:
        if kind is bool:
            return _TRUTH_VALUES[text.lower()]
        return float(text) if kind is float else int(text)
    except (KeyError, ValueError):
        raise ConfigError(_ENVIRONMENT, variable, text, _TYPE_NAMES[kind]) from None


def describe_ignored_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable that begins like a setting but is none.

    Such variables are no error: Kubernetes makes similar names, without `__`, from the name of a
    service.
    """
    known = _list_variables()
    return [
        f"the variable {name} is ignored, as no setting has it; nearest: "
        f"{_find_nearest(name, known)}"
        for name in environ
        if name.startswith(ENVIRONMENT_PREFIX) and not _is_own_variable(name)
    ]


def _check_environment(environ: Mapping[str, str]) -> None:
    given = dict.fromkeys(filter(_is_own_variable, environ), "")
    _check_names(_ENVIRONMENT, "", given, _list_variables())


def _list_variables() -> list[str]:
    return [
        _build_variable_name(section, field.name)
        for section, kind in _SECTIONS.items()
        for field in dataclasses.fields(kind)
    ]


def _build_variable_name(section: str, key: str) -> str:
    return f"{ENVIRONMENT_PREFIX}{section}__{key}".upper()


def _is_own_variable(name: str) -> bool:
    return name.startswith(ENVIRONMENT_PREFIX) and "__" in name


def _check_names(
    source: str, prefix: str, given: Mapping[str, object], known: Iterable[str]
) -> None:
    names = list(known)
    for name in given:
        if name not in names:
            near = UnknownKey(_find_nearest(name, names))
            raise ConfigError(source, f"{prefix}{name}", near, ", ".join(names))


def _find_nearest(name: str, names: Sequence[str]) -> str:
    return difflib.get_close_matches(name, names, n=1, cutoff=0)[0]


def _format_value(value: object) -> str:
    # A JSON string is a valid TOML basic string, and JSON spells true and false as TOML does.
    return json.dumps(value) if isinstance(value, str | bool) else str(value)


LIVE_SETTINGS = {
    "agent": (
        "roots",
        "keep_free_bytes",
        "keep_free_ratio",
        "keep_free_inodes_ratio",
        "disk_bytes",
        "job_bytes",
        "retain_days",
        "retain_bytes",
    ),
    "coordinator": ("roots",),
    "log": ("level",),
}
"""Settings that a reload applies; files of certificates are reloaded whenever they change."""


@dataclass(frozen=True, slots=True)
class SettingsChange:
    """Result of a reload of the settings."""

    settings: DaemonSettings
    """Settings in effect after the reload."""
    changed: tuple[str, ...]
    """Names of the settings that were applied."""
    pending_restart: tuple[str, ...]
    """Names of changed settings that need a restart."""


def adopt_settings(old: DaemonSettings, new: DaemonSettings) -> SettingsChange:
    """Return the old settings, with the values of the new ones for all settings in
    `LIVE_SETTINGS`.
    """
    changed: list[str] = []
    pending: list[str] = []
    sections: dict[str, object] = {}
    for section in dataclasses.fields(DaemonSettings):
        before, after = getattr(old, section.name), getattr(new, section.name)
        live = LIVE_SETTINGS.get(section.name, ())
        names = [f.name for f in dataclasses.fields(after)]
        other = [name for name in names if getattr(before, name) != getattr(after, name)]
        applied = {name: getattr(after, name) for name in other if name in live}
        changed += [f"{section.name}.{name}" for name in other if name in live]
        pending += [f"{section.name}.{name}" for name in other if name not in live]
        sections[section.name] = dataclasses.replace(before, **applied)
    return SettingsChange(dataclasses.replace(old, **sections), tuple(changed), tuple(pending))
