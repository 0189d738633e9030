"""The section `rankdump` of a configuration file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.configurations import (
    NOT_TEXT,
    body_of,
    load_body,
    load_common,
    load_text,
    refusal,
)

from rankdump._config.config_file import load_config_plan
from rankdump._core.plan import DeliverySettings, DumpPlan, OutputSettings
from rankdump._session.plan_source import resolve_plan
from rankdump.errors import ConfigError


def load_own(folder: Path, section: object) -> DumpPlan:
    return load_body(folder, {**body_of(), "rankdump": section})


def test_rankdump_section_sets_every_field(tmp_path: Path):
    """Every key of the section has its field."""
    plan = load_own(
        tmp_path,
        {
            "layout": "mindspore-async",
            "profile": "ms2.0",
            "codec": "none",
            "on_full": "drop",
            "block_timeout_s": 2,
            "buffer_bytes": 4096,
            "durability": "synced",
            "strict": True,
            "shared_memory": False,
            "max_step_overhead": 0.05,
            "optimizer_states": True,
            "fingerprints": True,
            "card": False,
            "baseline": "/data//earlier/",
            "file_mode": "0640",
            "folder_mode": "770",
        },
    )
    assert plan.output == OutputSettings(
        "/tmp/dump", "LeNet", "mindspore-async", "ms2.0", "none", 0o640, 0o770
    )
    assert plan.delivery == DeliverySettings("drop", 2.0, 4096, "synced", True, False, True, 0.05)
    assert plan.selection.optimizer_states
    assert plan.content.fingerprints
    assert not plan.content.run_card
    assert plan.content.baseline == "/data/earlier"
    assert not plan.warnings
    assert load_own(tmp_path, {}) == load_common(tmp_path)
    assert load_own(tmp_path, {}).content.run_card


@pytest.mark.parametrize("profile", ["ms2.3", "ms2.4", "ms2.0"])
def test_rankdump_section_accepts_every_profile(tmp_path: Path, profile: str):
    """Every profile can be selected; the default is that of the layout."""
    assert load_own(tmp_path, {"profile": profile}).output.profile == profile
    assert load_own(tmp_path, {}).output.profile == "ms2.3"


OWN_REFUSED: list[tuple[str, tuple[Any, ...], str]] = [
    ("layout", (*NOT_TEXT, "CANN", "rank", ""), '"cann", "cann-step"'),
    ("profile", (*NOT_TEXT, "ms2.2", "MS2.3", ""), '"ms2.3", "ms2.4" or "ms2.0"'),
    ("codec", (*NOT_TEXT, "gzip", ""), '"none", "zstd" or "zstd-always"'),
    ("on_full", (*NOT_TEXT, "wait"), '"block", "drop" or "statistic"'),
    ("block_timeout_s", (-1, "3", True, None, 86_401, 10**400), "seconds from 0 to 86400"),
    ("buffer_bytes", (0, -1, 1.5, "1", True, None, 1 << 41), "whole bytes from 1 to"),
    ("durability", (*NOT_TEXT, "maybe"), '"written" or "synced"'),
    ("strict", (0, "no", None), "true or false"),
    ("shared_memory", (0, "no", None), "true or false"),
    (
        "max_step_overhead",
        (-0.1, 1.5, 5, True, "5%", None, 10**400),
        "a share of the step from 0 (no limit) to 1",
    ),
    ("optimizer_states", (0, "no", None, ["exp_avg"]), "true or false"),
    ("fingerprints", (0, "no", None, ["all"]), "true or false"),
    ("card", (0, "no", None, {}), "true or false"),
    (
        "baseline",
        (*NOT_TEXT, "", "earlier", "~/earlier", "/a\0b", "/" + "a" * 5000),
        "the absolute path of an earlier tree",
    ),
    ("file_mode", (0o440, "440x", "0o440", "8888", "", "0040", "07777"), "octal text"),
    ("folder_mode", (0o750, "0600", "0070"), "octal text"),
]


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [(key, value, allowed) for key, values, allowed in OWN_REFUSED for value in values],
)
def test_rankdump_section_rejects_wrong_values(
    tmp_path: Path, key: str, value: object, allowed: str
):
    """The line names the key, the value and what is allowed."""
    with pytest.raises(ConfigError) as caught:
        load_own(tmp_path, {key: value})
    assert caught.value.key == f"rankdump.{key}"
    assert allowed in caught.value.allowed


def test_rankdump_section_rejects_an_infinite_timeout(tmp_path: Path):
    """A literal too large for a float is not a number of seconds."""
    text = json.dumps(body_of(own={"block_timeout_s": 0.5}))
    with pytest.raises(ConfigError, match="block_timeout_s: inf is not allowed"):
        load_text(tmp_path, text.replace("0.5", "1e999"))


@pytest.mark.parametrize(
    ("key", "nearest"), [("codek", "codec"), ("buffer", "buffer_bytes"), ("profil", "profile")]
)
def test_rankdump_section_names_the_nearest_key(tmp_path: Path, key: str, nearest: str):
    """A misspelt key is an error in this section."""
    error = refusal(tmp_path, body_of(own={key: 1}))
    assert error.key == f"rankdump.{key}"
    assert f"rankdump.{key}: unknown key; nearest: {nearest}; allowed: " in str(error)


@pytest.mark.parametrize(
    ("changed", "warned"),
    [
        ({"op_debug_mode": 3}, True),
        ({"op_debug_mode": 4}, True),
        ({"input_output": 1}, True),
        ({"input_output": 2}, False),
    ],
)
def test_states_of_optimizers_that_no_plan_keeps_are_a_warning(
    tmp_path: Path, changed: dict[str, Any], warned: bool
):
    """States are outputs, and no operator of theirs overflows or raises."""
    plan = load_body(tmp_path, body_of(common=changed, own={"optimizer_states": True}))
    found = [text for text in plan.warnings if text.startswith("rankdump.optimizer_states: True")]
    assert len(found) == warned
    assert plan.selection.optimizer_states


@pytest.mark.parametrize(("mode", "warned"), [("host", False), ("device", True)])
def test_fingerprints_beside_statistics_of_a_device_are_a_warning(
    tmp_path: Path, mode: str, warned: bool
):
    """The elements of a tensor of an accelerator do not come to the host then."""
    body = body_of(common={"saved_data": "statistic"}, own={"fingerprints": True})
    body["e2e_dump_settings"] = {"enable": True, "trans_flag": True, "stat_calc_mode": mode}
    plan = load_body(tmp_path, body)
    found = [text for text in plan.warnings if text.startswith("rankdump.fingerprints: True")]
    assert len(found) == warned
    assert plan.content.fingerprints


@pytest.mark.parametrize(("saved", "warned"), [("statistic", True), ("full", False)])
def test_baseline_of_statistics_is_a_warning(tmp_path: Path, saved: str, warned: bool):
    """Where no elements are stored, none are left out."""
    plan = load_body(
        tmp_path, body_of(common={"saved_data": saved}, own={"baseline": "/data/earlier"})
    )
    assert any(text.startswith("rankdump.baseline") for text in plan.warnings) == warned


def test_environment_replaces_the_baseline(tmp_path: Path):
    """The variable holds for every configuration, and is an error where it is not absolute."""
    path = tmp_path / "data_dump.json"
    path.write_text(json.dumps(body_of(own={"baseline": "/data/earlier"})))
    plan, _ = load_config_plan(path, {"RANKDUMP_BASELINE": "/data//other/"})
    assert plan.content.baseline == "/data/other"
    with pytest.raises(ConfigError, match="RANKDUMP_BASELINE: 'other' is not allowed"):
        load_config_plan(path, {"RANKDUMP_BASELINE": "other"})
    given = DumpPlan(OutputSettings("/tmp/x"))
    resolved = resolve_plan(given, {"RANKDUMP_BASELINE": "/data/other"})
    assert resolved is not None
    assert resolved.content.baseline == "/data/other"
