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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from rankdump.contract.errors import ConfigError
from rankdumpd.settings.guard import LogSettings, MetricsSettings, TlsSettings
from rankdumpd.settings.sections import AgentSettings, CoordinatorSettings

__all__ = [
    "ENVIRONMENT_PREFIX",
    "AgentSettings",
    "CoordinatorSettings",
    "LogSettings",
    "MetricsSettings",
    "Settings",
    "TlsSettings",
    "environment",
    "load",
    "without_settings",
]

_toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

ENVIRONMENT_PREFIX = "RANKDUMPD_"
_TRUTH = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class Settings:
    """Both processes; each reads its own section, and those behind them."""

    agent: AgentSettings = field(default_factory=AgentSettings)
    coordinator: CoordinatorSettings = field(default_factory=CoordinatorSettings)
    tls: TlsSettings = field(default_factory=TlsSettings)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    log: LogSettings = field(default_factory=LogSettings)

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


_SECTIONS: dict[str, type[Any]] = {
    "agent": AgentSettings,
    "coordinator": CoordinatorSettings,
    "tls": TlsSettings,
    "metrics": MetricsSettings,
    "log": LogSettings,
}
_OF_WORKERS = ("agent", "tls", "log")
"""Sections that the workers of an agent have as well."""


def environment(settings: Settings) -> dict[str, str]:
    """Return the variables that give a worker of an agent exactly these settings."""
    return {
        _variable(section, field.name): str(getattr(getattr(settings, section), field.name))
        for section in _OF_WORKERS
        for field in dataclasses.fields(_SECTIONS[section])
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
            **{
                name: section(**_values(name, source, tables, environ))
                for name, section in _SECTIONS.items()
            }
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
    defaults = _SECTIONS[section]()
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
        if kind is bool:
            return _TRUTH[text.lower()]
        return float(text) if kind is float else int(text)
    except (KeyError, ValueError):
        raise ConfigError("environment", variable, text, f"type {kind.__name__}") from None


def _check_environment(environ: Mapping[str, str]) -> None:
    known = [
        _variable(section, field.name)
        for section, kind in _SECTIONS.items()
        for field in dataclasses.fields(kind)
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
    # JSON's text is a TOML basic string too, and its truth values are TOML's.
    return json.dumps(value) if isinstance(value, str | bool) else str(value)
