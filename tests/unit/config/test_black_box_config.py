"""The black box in configurations, and the configuration that has nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.configurations import body_of, load_body, refusal

from rankdump._config.config_file import make_black_box_plan
from rankdump._core.plan import BlackBoxSettings, WatchRule, plan_from_json, plan_to_json
from rankdump._core.selection import decide_iteration
from rankdump._session.plan_source import load_session_config
from rankdump.errors import ConfigError, ProtocolError

FORCED = {"RANKDUMP_BLACKBOX": "1"}


def test_section_sets_the_black_box(tmp_path: Path):
    assert load_body(tmp_path, body_of()).black_box == BlackBoxSettings()
    assert load_body(tmp_path, body_of(own={"blackbox": False})).black_box.steps == 0
    assert load_body(tmp_path, body_of(own={"blackbox": True})).black_box == BlackBoxSettings(64)
    own = {
        "steps": 8,
        "post_steps": 1,
        "max_overhead": 0.02,
        "max_bytes": 4096,
        "pause_s": 0.5,
        "tensor_bytes": 1 << 20,
    }
    plan = load_body(tmp_path, body_of(own={"blackbox": own}))
    assert plan.black_box == BlackBoxSettings(8, 1, 0.02, 4096, 0.5, (), 1 << 20)
    assert plan_from_json(plan_to_json(plan)).black_box == plan.black_box


def test_section_alone_may_ask_for_states_of_optimizers(tmp_path: Path):
    """They are dumped once the dump is switched on, as `rankdump control` does."""
    own = {"path": "/tree", "blackbox": True, "optimizer_states": True}
    assert load_body(tmp_path, {"rankdump": own}).selection.optimizer_states
    assert not load_body(
        tmp_path, {"rankdump": own | {"optimizer_states": False}}
    ).selection.optimizer_states


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (1, "rankdump.blackbox: 1 is not allowed; allowed: true, false or an object"),
        ({"step": 1}, "rankdump.blackbox.step"),
        ({"steps": 0}, "steps from 1 to 4096"),
        ({"steps": "8"}, "steps from 1 to 4096"),
        ({"max_overhead": 0}, "a share of the step from 0.001 to 1"),
        ({"pause_s": -1}, "seconds from 0"),
        ({"tensor_bytes": -1}, "bytes from 0"),
        ({"tensor_bytes": 1 << 31}, "bytes from 0"),
    ],
)
def test_wrong_value_is_one_line(tmp_path: Path, value: object, fault: str):
    error = refusal(tmp_path, body_of(own={"blackbox": value}))
    assert fault in str(error)


RULE = {"when": "too_large", "value": 1e4}


def test_rules_are_read(tmp_path: Path):
    bodies = [
        {"when": "zero"},
        RULE | {"operators": ["layers.*.mlp", "Conv2d"], "steps": 3, "do": "freeze"},
        {"when": "unchanged"},
        {"when": "jump", "do": "dump", "iterations": 4},
    ]
    plan = load_body(tmp_path, body_of(own={"blackbox": {"watch": bodies}}))
    assert plan.black_box.watch == (
        WatchRule("zero"),
        WatchRule("too_large", ("layers.*.mlp", "Conv2d"), 1e4, 3, "freeze"),
        WatchRule("unchanged", steps=2),
        WatchRule("jump", do="dump", iterations=4),
    )
    assert plan_from_json(plan_to_json(plan)).black_box == plan.black_box
    assert not plan.warnings


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("zero", "rankdump.blackbox.watch: 'zero' is not allowed; allowed: a list of up to 100"),
        ([{"when": "zero"}] * 101, "a list of up to 100 objects"),
        (["zero"], "rankdump.blackbox.watch[0]: 'zero' is not allowed; allowed: an object with"),
        ([{}], "rankdump.blackbox.watch[0].when"),
        (
            [{"when": "nan"}],
            "rankdump.blackbox.watch[0].when: 'nan' is not allowed; allowed: \"non_finite\", "
            '"jump", "zero", "unchanged" or "too_large"',
        ),
        ([{"when": "zero"}, {"when": "jump", "op": ["a"]}], "watch[1].op: "),
        ([{"when": "jump", "operator": ["a"]}], "nearest: operators"),
        ([{"when": "jump", "operators": []}], "watch[0].operators"),
        ([{"when": "jump", "operators": "fc"}], "a list of 1 to 100 globs"),
        ([{"when": "jump", "operators": [""]}], "each of 1 to 1000 characters"),
        ([{"when": "jump", "operators": ["a", 1]}], "watch[0].operators"),
        ([{"when": "too_large"}], "watch[0].value"),
        ([{"when": "too_large", "value": -1}], "the largest magnitude that is allowed, from 0"),
        ([{"when": "too_large", "value": "big"}], "watch[0].value: 'big'"),
        ([{"when": "zero", "value": 1}], "the condition too_large alone has one"),
        ([{"when": "zero", "steps": 0}], "a whole number of steps from 1 to 4096"),
        ([{"when": "zero", "steps": 1.5}], "a whole number of steps from 1 to 4096"),
        ([{"when": "unchanged", "steps": 1}], "a whole number of steps from 2 to 4096"),
        ([{"when": "zero", "iterations": 2}], "the action dump alone has one"),
        ([{"when": "zero", "do": "dump", "iterations": 0}], "number of iterations from 1 to 4096"),
        ([{"when": "zero", "do": "stop"}], "watch[0].do: 'stop'"),
    ],
)
def test_wrong_rule_is_one_line(tmp_path: Path, value: object, fault: str):
    error = refusal(tmp_path, body_of(own={"blackbox": {"watch": value}}))
    assert fault in str(error)
    assert "\n" not in str(error)


def test_plan_of_an_earlier_client_has_no_rules(tmp_path: Path):
    plan = load_body(tmp_path, body_of(own={"blackbox": True}))
    body = json.loads(plan_to_json(plan))
    del body["black_box"]["watch"]
    assert plan_from_json(json.dumps(body).encode()) == plan


def test_section_alone_selects_no_tensor(tmp_path: Path):
    plan = load_body(tmp_path, {"rankdump": {"path": "/tmp/dump", "blackbox": True}})
    assert (plan.output.root, plan.dialect, plan.black_box.steps) == ("/tmp/dump", "rankdump", 64)
    assert not any(decide_iteration(plan, iteration).accepted for iteration in range(100))
    assert not plan.warnings
    assert plan_from_json(plan_to_json(plan)) == plan


def test_section_alone_needs_a_path_and_a_black_box(tmp_path: Path):
    assert "rankdump.path" in str(refusal(tmp_path, {"rankdump": {"blackbox": True}}))
    (warning,) = load_body(tmp_path, {"rankdump": {"path": "/tmp/dump"}}).warnings
    assert "selects no tensor and has no blackbox" in warning


def test_misspelt_section_is_not_taken_for_a_black_box(tmp_path: Path):
    body = {"common_dump_setting": {}, "rankdump": {"blackbox": True}}
    assert "common_dump_settings" in str(refusal(tmp_path, body))


def test_environment_switches_the_black_box_on(tmp_path: Path):
    assert load_body(tmp_path, body_of(), FORCED).black_box.steps == 64
    own = body_of(own={"blackbox": {"steps": 8}})
    assert load_body(tmp_path, own, FORCED).black_box.steps == 8
    assert load_body(tmp_path, body_of(), {"RANKDUMP_BLACKBOX": "0"}).black_box.steps == 0


def test_environment_alone_makes_a_plan(tmp_path: Path):
    environ = FORCED | {"RANKDUMP_OUTPUT": str(tmp_path)}
    config = load_session_config(environ)
    assert config is not None
    assert (config.plan.output.root, config.plan.black_box.steps) == (str(tmp_path), 64)
    assert load_session_config({"RANKDUMP_OUTPUT": str(tmp_path)}) is None
    with pytest.raises(ConfigError, match=r"RANKDUMP_BLACKBOX: rankdump\.path"):
        make_black_box_plan(FORCED)


@pytest.mark.parametrize(
    "settings",
    [
        BlackBoxSettings(5000),
        BlackBoxSettings(-1),
        BlackBoxSettings(max_overhead=2.0),
        BlackBoxSettings(max_bytes=-1),
        BlackBoxSettings(pause_s=float("inf")),
        BlackBoxSettings(tensor_bytes=1 << 31),
        BlackBoxSettings(tensor_bytes=-1),
        BlackBoxSettings(watch=(WatchRule("zero"),) * 101),
        BlackBoxSettings(watch=(WatchRule("zero", ("a",) * 101),)),
        BlackBoxSettings(watch=(WatchRule("zero", ("a" * 1001,)),)),
        BlackBoxSettings(watch=(WatchRule("zero", steps=0),)),
        BlackBoxSettings(watch=(WatchRule("zero", iterations=0),)),
        BlackBoxSettings(watch=(WatchRule("zero", value=float("nan")),)),
    ],
)
def test_hostile_plan_is_rejected(tmp_path: Path, settings: BlackBoxSettings):
    plan = replace(load_body(tmp_path, body_of()), black_box=settings)
    with pytest.raises(ProtocolError):
        plan_from_json(plan_to_json(plan))


def test_plan_of_an_earlier_release_says_nothing_of_full_tensors(tmp_path: Path):
    plan = load_body(tmp_path, body_of(own={"blackbox": True}))
    body = json.loads(plan_to_json(plan))
    del body["black_box"]["tensor_bytes"]
    assert plan_from_json(json.dumps(body).encode()).black_box == plan.black_box
