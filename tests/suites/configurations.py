"""Configuration files for tests: written, loaded, and refused in one line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from rankdump.contract.dialect import load
from rankdump.contract.errors import ConfigError
from rankdump.contract.plan import DumpPlan

NOT_UINT = (-1, 1.0, "0", True, None, [0], 1 << 64)
NOT_TEXT = (0, None, True, ["all"], {})
NOT_ARRAY = ("all", 0, None, {}, True)
ABSENT = object()
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


def changed(base: Mapping[str, object], key: str, value: object) -> dict[str, object]:
    return {**base, key: value} if value is not ABSENT else {k: base[k] for k in base if k != key}


def load_text(folder: Path, text: str | bytes, environ: Mapping[str, str] = {}) -> DumpPlan:
    path = folder / "data_dump.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    plan, data = load(path, environ)
    assert data == path.read_bytes()
    return plan


def load_body(folder: Path, body: object, environ: Mapping[str, str] = {}) -> DumpPlan:
    return load_text(folder, json.dumps(body), environ)


def load_common(folder: Path, **changes: object) -> DumpPlan:
    return load_body(folder, {"common_dump_settings": {**COMMON, **changes}})


def refusal(folder: Path, body: object, environ: Mapping[str, str] = {}) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_body(folder, body, environ)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{folder / 'data_dump.json'}: ")
    return caught.value
