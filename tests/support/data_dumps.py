"""Configurations that dump every operator: the content of a `data_dump.json`, and its file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path


def make_data_dump(
    tree: object,
    *,
    devices: Sequence[int] = (0, 1),
    own: Mapping[str, object] | None = None,
    **common: object,
) -> dict[str, object]:
    """Return a configuration that dumps every operator of these devices into a tree.

    `own` is its section `rankdump`, `common` changes its common settings.
    """
    settings: dict[str, object] = {
        "dump_mode": 0,
        "path": str(tree),
        "net_name": "Net",
        "iteration": "all",
        "saved_data": "tensor",
        "input_output": 0,
        "kernels": [],
        "support_device": list(devices),
        **common,
    }
    body: dict[str, object] = {
        "common_dump_settings": settings,
        "e2e_dump_settings": {"enable": True, "trans_flag": True},
    }
    return body if own is None else body | {"rankdump": dict(own)}


def write_data_dump(
    folder: Path,
    tree: object,
    *,
    devices: Sequence[int] = (0, 1),
    own: Mapping[str, object] | None = None,
    name: str = "data_dump.json",
    **common: object,
) -> Path:
    """Write such a configuration into a folder; return the file."""
    file = folder / name
    file.write_text(json.dumps(make_data_dump(tree, devices=devices, own=own, **common)))
    return file
