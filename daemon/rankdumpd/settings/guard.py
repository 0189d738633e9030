"""The settings that all processes share: certificates, metrics and logs. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rankdump.contract.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """Certificates; all empty means none, and then TCP is for loopback alone."""

    ca: str = ""
    """File of the authorities whose certificates are believed, PEM, absolute."""
    certificate: str = ""
    """File of the own certificate, PEM, absolute."""
    key: str = ""
    """File of its private key, PEM, absolute."""
    revoked: str = ""
    """File of certificates that are believed no more, a fingerprint a line; empty: none."""

    def __post_init__(self) -> None:
        given = {"ca": self.ca, "certificate": self.certificate, "key": self.key}
        if any(given.values()) or self.revoked:
            for name, path in given.items():
                _absolute(f"tls.{name}", path)
        if self.revoked:
            _absolute("tls.revoked", self.revoked)

    @property
    def on(self) -> bool:
        """Whether there are certificates."""
        return bool(self.certificate)


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """What monitoring may read."""

    listen: str = ""
    """Where Prometheus asks for metrics, `host:port`; empty: nowhere."""


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What a process says of itself, on standard error, and who did what with it."""

    format: str = "text"
    """`text` for people, or `json`: an object a line."""
    level: str = "info"
    """`debug`, `info`, `warning` or `error`."""
    audit: str = ""
    """File, absolute, of who read or changed what, an object a line; empty: none."""

    def __post_init__(self) -> None:
        _one_of("log.format", self.format, FORMATS)
        _one_of("log.level", self.level, LEVELS)
        if self.audit:
            _absolute("log.audit", self.audit)


def _absolute(key: str, path: str) -> None:
    if not Path(path).is_absolute():
        raise ConfigError("settings", key, path, "an absolute path")


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError("settings", key, value, ", ".join(allowed))
