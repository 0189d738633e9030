"""Row of the table of configurations: a change of the base configuration and its result."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path

from support.configurations import ABSENT, body_of, load_body, refusal

from rankdump._core.plan import DumpPlan
from rankdump.errors import MISSING_VALUE, ConfigError


@dataclass(frozen=True)
class ConfigurationRow:
    """`refused` names the dotted key at fault; otherwise the plan has `gives` and all `warns`."""

    source: str
    """Number of the rule in the MindSpore 2.3 Dump guide, and the rule in words."""
    common: Mapping[str, object] = field(default_factory=dict[str, object])
    e2e: object = field(default_factory=dict[str, object])
    own: Mapping[str, object] = field(default_factory=dict[str, object])
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    gives: Mapping[str, object] = field(default_factory=dict[str, object])
    """Fields of the plan by dotted path; none at all means the base plan."""
    warns: tuple[str, ...] = ()
    """A piece of each warning, in order, and no further warning."""
    refused: str = ""
    allowed: str = ""
    """A piece of what the refusal says is allowed."""

    def check(self, folder: Path) -> None:
        """Hold the loaded configuration against the row."""
        body = body_of(common=self.common, e2e=self.e2e, own=self.own)
        if self.refused:
            self._check_refusal(refusal(folder, body, self.environ), {**self.environ, **body})
        else:
            self._check_plan(load_body(folder, body, self.environ), load_body(folder, body_of()))

    def _check_refusal(self, error: ConfigError, body: object) -> None:
        assert error.key == self.refused
        assert error.value == _value_at(body, self.refused)
        assert self.allowed
        assert self.allowed in error.allowed

    def _check_plan(self, plan: DumpPlan, base: DumpPlan) -> None:
        for path, value in self.gives.items():
            assert attrgetter(path)(plan) == value, path
        if not self.gives:
            assert replace(plan, warnings=()) == base
        assert len(plan.warnings) == len(self.warns), plan.warnings
        for warning, piece in zip(plan.warnings, self.warns, strict=True):
            assert piece in warning
            assert "\n" not in warning


def _value_at(body: object, key: str) -> object:
    value = body
    for name in re.findall(r"[^.\[\]]+", key):
        if isinstance(value, list):
            value = value[int(name)]
        else:
            value = value.get(name, MISSING_VALUE) if isinstance(value, dict) else MISSING_VALUE
    return value


def refused(
    source: str, key: str, *values: object, allowed: str, **common: object
) -> list[ConfigurationRow]:
    """Rows for values that a key of either section may not have."""
    section, name = key.split(".")
    rows: list[ConfigurationRow] = []
    for value in values:
        changes = {name: value}
        mine = section == "common_dump_settings"
        rows.append(
            ConfigurationRow(
                f"{source}: {name} {'missing' if value is ABSENT else repr(value)}",
                common={**common, **changes} if mine else common,
                e2e={} if mine else changes,
                refused=key,
                allowed=allowed,
            )
        )
    return rows
