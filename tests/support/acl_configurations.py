"""Row of the table of acl.json files, and how such a file is written and loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from support.configurations import ABSENT

from rankdump._config.config_file import load_config_plan
from rankdump._core.plan import DumpPlan, plan_from_json, plan_to_json
from rankdump.errors import MISSING_VALUE, ConfigError

HERE = "{here}"
"""Stands for a folder that exists."""


def load_acl(folder: Path, body: object, environ: Mapping[str, str] = {}) -> DumpPlan:
    path = folder / "acl.json"
    path.write_text(json.dumps(body))
    plan, data = load_config_plan(path, environ)
    assert data == path.read_bytes()
    assert plan_from_json(plan_to_json(plan)) == plan
    return plan


@dataclass(frozen=True)
class AclRow:
    """`dump` is added to one that dumps model A; `refused` is the key at fault within it."""

    source: str
    """The row of the table in words, and after `:` which case of it."""
    dump: Any = field(default_factory=dict)
    own: Mapping[str, object] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    gives: Mapping[str, object] = field(default_factory=dict)
    """Fields of the plan by dotted path."""
    warns: tuple[str, ...] = ()
    """A piece of each warning, in order, and no further warning."""
    refused: str = ""
    value: object = None
    code: str = ""
    bare: bool = False
    """The dump is the row's own and nothing else."""

    def check(self, folder: Path) -> None:
        """Hold the loaded file against the row."""
        here = folder / "dumps"
        here.mkdir()
        (folder / "file").write_text("")
        body = {"dump": self._dump(str(here), str(folder))} if self.dump is not ABSENT else {}
        body |= {"rankdump": self.own} if self.own else {}
        environ = {name: text.replace(HERE, str(here)) for name, text in self.environ.items()}
        if not self.refused:
            self._check_plan(load_acl(folder, body, environ), str(here))
            return
        with pytest.raises(ConfigError) as caught:
            load_acl(folder, body, environ)
        error, line = caught.value, str(caught.value)
        assert error.key == self.refused
        assert line.startswith(f"{folder / 'acl.json'}: {self.refused}: ")
        assert line.endswith(f"({self.code})")
        assert line.isprintable()
        if self.value is not None:
            assert error.value == (MISSING_VALUE if self.value is ABSENT else self.value)

    def _dump(self, here: str, folder: str) -> object:
        if not isinstance(self.dump, dict):
            return self.dump
        base = {} if self.bare else {"dump_path": HERE, "dump_list": [{"model_name": "A"}]}
        kept = {k: v for k, v in {**base, **self.dump}.items() if v is not ABSENT}
        text = json.dumps(kept).replace(HERE, here).replace("{folder}", folder)
        return json.loads(text)

    def _check_plan(self, plan: DumpPlan, here: str) -> None:
        for path, value in self.gives.items():
            wanted = value.replace(HERE, here) if isinstance(value, str) else value
            assert attrgetter(path)(plan) == wanted, path
        assert len(plan.warnings) == len(self.warns), plan.warnings
        for warning, piece in zip(plan.warnings, self.warns, strict=True):
            assert piece in warning
            assert warning.isprintable()


def refused(source: str, key: str, *values: object, code: str, **beside: object) -> list[AclRow]:
    """Rows for values that a key of the section may not have."""
    return [
        AclRow(
            f"{source}: {key} {'missing' if value is ABSENT else repr(value)[:30]}",
            {**beside, key: value},
            refused=f"dump.{key}",
            value=value,
            code=code,
        )
        for value in values
    ]
