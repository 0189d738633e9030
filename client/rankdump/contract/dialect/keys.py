"""The keys that MindSpore looks up in `data_dump.json`, and a word on every other one. Pure.

Facts: mindspore-dump.md 1.1, 1.3 and 1.8. MindSpore ignores what it does not know, in silence.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import cast

from rankdump.contract.dialect.notes import Notes
from rankdump.contract.dialect.rankdump_section import SECTION

COMMON = "common_dump_settings"
E2E = "e2e_dump_settings"
KEYS: dict[str, tuple[str, ...]] = {
    COMMON: (
        "dump_mode",
        "path",
        "net_name",
        "iteration",
        "saved_data",
        "input_output",
        "kernels",
        "support_device",
        "op_debug_mode",
        "file_format",
        "statistic_category",
        "overflow_number",
        "initial_iteration",
    ),
    E2E: (
        "enable",
        "trans_flag",
        "save_kernel_args",
        "sample_mode",
        "sample_num",
        "stat_calc_mode",
        "device_stat_precision_mode",
    ),
}
"""By the section that holds them."""

_SECTIONS = (*KEYS, SECTION)
_GONE = {"async_dump_settings": "MindSpore has not read it since version 1.3"}
_ALIKE = 0.6
"""How alike two spellings are, from 0 to 1, before one is taken for the other."""


def note_unknown(body: Mapping[str, object], notes: Notes) -> None:
    """Note every key that nothing reads, with the known one that was probably meant."""
    for key, value in body.items():
        if key not in _SECTIONS:
            reason = _GONE.get(key) or _elsewhere(key) or _nearest(key, _SECTIONS)
            notes.add(key, value, f"is ignored: {reason}")
    for section, known in KEYS.items():
        values = body.get(section)
        if isinstance(values, dict):
            for key, value in cast("dict[str, object]", values).items():
                if key not in known:
                    reason = _elsewhere(key) or _nearest(key, known)
                    notes.add(f"{section}.{key}", value, f"is ignored: {reason}")


def _elsewhere(key: str) -> str:
    return next((f"the key belongs in {name}" for name, known in KEYS.items() if key in known), "")


def _nearest(key: str, known: tuple[str, ...]) -> str:
    nearest = difflib.get_close_matches(key.lower(), known, n=1, cutoff=_ALIKE)
    return "there is no such key" + (f"; the nearest is {nearest[0]}" if nearest else "")
