"""Configuration files for tests: written, loaded, and rejected in one line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest

from rankdump._config.config_file import load_config_plan
from rankdump._core.plan import DumpPlan
from rankdump.errors import ConfigError

NOT_UINT = (-1, 1.0, "0", True, None, [0], 1 << 64)
NOT_TEXT = (0, None, True, ["all"], {})
NOT_ARRAY = ("all", 0, None, {}, True)


class _Absent:
    """The value of a key that is not there; in names of tests the same in every process."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()
COMMON: dict[str, object] = {
    "dump_mode": 0,
    "path": "/tmp/dump",
    "net_name": "LeNet",
    "iteration": "all",
    "input_output": 0,
    "kernels": [],
    "support_device": [0, 1],
}
E2E: dict[str, object] = {"enable": True, "trans_flag": True}


def body_of(
    *, common: Mapping[str, object] = {}, e2e: object = {}, own: Mapping[str, object] = {}
) -> dict[str, object]:
    """The base configuration with changes; ABSENT takes a key, or the e2e section, away."""
    body: dict[str, object] = {"common_dump_settings": merged(COMMON, common)}
    if e2e is not ABSENT:
        changes = cast("dict[str, object] | None", e2e if isinstance(e2e, dict) else None)
        body["e2e_dump_settings"] = e2e if changes is None else merged(E2E, changes)
    return body | ({"rankdump": own} if own else {})


def merged(base: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in {**base, **changes}.items() if value is not ABSENT}


def load_text(folder: Path, text: str | bytes, environ: Mapping[str, str] = {}) -> DumpPlan:
    path = folder / "data_dump.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    plan, data = load_config_plan(path, environ)
    assert data == path.read_bytes()
    return plan


def load_body(folder: Path, body: object, environ: Mapping[str, str] = {}) -> DumpPlan:
    return load_text(folder, json.dumps(body), environ)


def load_common(folder: Path, **changes: object) -> DumpPlan:
    return load_body(folder, body_of(common=changes))


def refusal(folder: Path, body: object, environ: Mapping[str, str] = {}) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_body(folder, body, environ)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{folder / 'data_dump.json'}: ")
    return caught.value
