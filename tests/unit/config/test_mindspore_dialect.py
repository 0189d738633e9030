"""data_dump.json: loading, sections and the keys of common_dump_settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.configurations import (
    COMMON,
    E2E,
    body_of,
    load_body,
    load_text,
    refusal,
)

from rankdump._config.config_file import load_config_plan
from rankdump._core.plan import (
    DumpPlan,
    OutputSettings,
    TensorSelection,
    plan_from_json,
    plan_to_json,
)
from rankdump.errors import MISSING_VALUE, ConfigError


def test_config_file_sets_every_field_of_the_plan(tmp_path: Path):
    """Every field of the plan follows from the file."""
    plan = load_body(tmp_path, {"common_dump_settings": COMMON, "e2e_dump_settings": E2E})
    assert plan == DumpPlan(
        output=OutputSettings(root="/tmp/dump", net_name="LeNet"),
        selection=TensorSelection(devices=(0, 1)),
        dialect="mindspore",
    )


# 1.1 loading

PLAIN = json.dumps(body_of())


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        "\ufeff" + PLAIN,
        " \r\n\t" + PLAIN + "\n",
    ],
    ids=["plain", "bom", "blanks"],
)
def test_config_file_tolerates_what_mindspore_tolerates(tmp_path: Path, text: str | bytes):
    """What MindSpore tolerates around the value changes nothing."""
    plan = load_text(tmp_path, text)
    assert plan == load_text(tmp_path, PLAIN)
    assert plan.warnings == ()


@pytest.mark.parametrize(
    ("junk", "shown"),
    [(b" trailing junk }{", "'trailing junk }{'"), (b"\xff\xfe\x00", "'\\udcff\\udcfe\\x00'")],
)
def test_text_behind_the_value_is_one_warning(tmp_path: Path, junk: bytes, shown: str):
    """MindSpore does not read it either; it may be the rest of an edit."""
    plan = load_text(tmp_path, PLAIN.encode() + junk)
    assert replace(plan, warnings=()) == load_text(tmp_path, PLAIN)
    expected = f"text behind the JSON value: {shown} is ignored: only the first value is read"
    assert plan.warnings == (expected,)


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        (
            json.dumps({**body_of(), "dump": {}}),
            "dump: {} is ignored: it is the section of a CANN acl.json",
        ),
        (
            PLAIN.replace('"dump_mode"', '"dump_mode": "first", "dump_mode"'),
            "dump_mode: 0 is the last of 2 equal keys and is the one used",
        ),
        (
            json.dumps({**body_of(), "async_dump_settings": {"enable": True}}),
            "async_dump_settings: {'enable': True} is ignored: MindSpore has ignored it since",
        ),
        (
            json.dumps({**body_of(), "e2e_dump_setting": {}}),
            "e2e_dump_setting: {} is ignored: there is no such key; the nearest is e2e_dump_set",
        ),
        (
            json.dumps({**body_of(), "dump_mode": 1}),
            "dump_mode: 1 is ignored: the key belongs in common_dump_settings",
        ),
        (json.dumps({**body_of(), "a\nb": [0] * 99}), "a\\nb: [0, 0, 0, 0, 0, 0, ...] is ignored"),
        (json.dumps({**body_of(), "x\ud800": "\udfff" * 99}), "x\\ud800: '"),
    ],
)
def test_config_file_warns_of_unread_and_repeated_keys(tmp_path: Path, text: str, warning: str):
    """A key that is not read, or comes twice, gives one warning and changes nothing else."""
    plan = load_text(tmp_path, text)
    assert replace(plan, warnings=()) == load_text(tmp_path, PLAIN)
    (found,) = plan.warnings
    assert found.startswith(warning)
    assert found.isprintable()
    assert plan_from_json(plan_to_json(plan)) == plan


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "'an empty file'"),
        (" \n", "'an empty file'"),
        ("{'a': 1}", "property name enclosed in double quotes in line 1, column 2, at 'a': 1}"),
        (PLAIN[:-1], "an end in line 1, column"),
        (PLAIN[:-1] + ",}", "a comma before } in line 1, column"),
        (PLAIN.replace("]", ",\n]", 1), "a comma before ] in line 2, column 1"),
        ("// comment\n" + PLAIN, "a comment in line 1, column 1"),
        ("\n\n" + PLAIN[:-1] + " # comment", "a comment in line 3, column"),
        (PLAIN.replace(":", ": /* all */", 1), "a comment in line 1, column"),
        (PLAIN.replace('"all"', "None"), "which JSON spells null"),
        (PLAIN.replace('"all"', "Nonesuch"), "at Nonesuch"),
        (PLAIN.encode("utf-16"), "'text in UTF-16 or UTF-32'"),
        (PLAIN.encode("utf-16-be"), "'text in UTF-16 or UTF-32'"),
        (b"\0" * 99, "Expecting value in line 1, column 1'"),
        (PLAIN.replace("LeNet", "Le\nNet"), "control character within a string in line 1, column"),
        (PLAIN.encode().replace(b"LeNet", b"Le\xffNet"), "not UTF-8"),
        (PLAIN.replace('"all"', "NaN"), "NaN"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_config_file_that_is_not_json_is_rejected(tmp_path: Path, text: str | bytes, cause: str):
    """The error is one line with the place in the file."""
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, text)
    assert cause in str(caught.value)
    assert "allowed: one JSON object in UTF-8" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ({}, "this file has no key"),
        ([], "[]"),
        (1, "1"),
        ("common_dump_settings", "'common_dump_settings'"),
        (None, "None"),
        ({"task": "tensor", "step": []}, "this file has task, step"),
        ({str(n): n for n in range(7)}, "this file has 0, 1, 2, 3, 4 and 2 more"),
        ({"x": 1, "Common_Dump_Setting": {}}, "the nearest is common_dump_settings"),
    ],
)
def test_config_file_of_no_dialect_is_rejected(tmp_path: Path, body: object, found: str):
    """The error names the known dialects, and what the file has in their place."""
    error = refusal(tmp_path, body)
    assert found in str(error)
    if isinstance(body, dict):
        assert (error.key, error.value) == ("common_dump_settings", MISSING_VALUE)
    assert "MindSpore data_dump.json" in error.allowed
    assert "CANN acl.json" in error.allowed


def test_config_file_that_cannot_be_read_is_rejected(tmp_path: Path):
    """Missing, a folder, another suffix: each has its own text."""
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "plan.txt").write_text(PLAIN)
    for name, cause in [
        ("missing.json", "missing.json: missing"),
        ("folder.json", "Is a directory"),
        ("plan.txt", "ends in .json"),
        ("plan.JSON", "ends in .json"),
        ("nul\0.json", "null byte"),
    ]:
        with pytest.raises(ConfigError, match=name[:4]) as caught:
            load_config_plan(tmp_path / name, {})
        assert cause in str(caught.value)


# 1.1 parse order

MANDATORY = ["dump_mode", "net_name", "iteration", "input_output", "kernels", "support_device"]


@pytest.mark.parametrize("index", range(len(MANDATORY)))
def test_missing_keys_are_reported_in_mindspores_order(tmp_path: Path, index: int):
    """Of several missing keys the first of MindSpore's order is named, before any bad value."""
    kept = dict.fromkeys(MANDATORY[:index], "bad")
    error = refusal(tmp_path, {"common_dump_settings": kept, "e2e_dump_settings": E2E})
    assert (error.key, error.value) == (f"common_dump_settings.{MANDATORY[index]}", MISSING_VALUE)
    assert "missing" in str(error)


@pytest.mark.parametrize("section", ["common_dump_settings", "e2e_dump_settings", "rankdump"])
@pytest.mark.parametrize("value", [[], None, 1, "x"])
def test_section_that_is_not_an_object_is_rejected(tmp_path: Path, section: str, value: object):
    """The error names the section."""
    error = refusal(tmp_path, {"common_dump_settings": COMMON, section: value})
    assert (error.key, error.value, error.allowed) == (section, value, "an object")


ORDER = [
    ("e2e_dump_settings.enable", 0),
    ("e2e_dump_settings.trans_flag", 0),
    ("e2e_dump_settings.save_kernel_args", 0),
    ("e2e_dump_settings.stat_calc_mode", 0),
    ("e2e_dump_settings.sample_mode", 2),
    ("common_dump_settings.dump_mode", 3),
    ("common_dump_settings.path", "x"),
    ("common_dump_settings.net_name", ""),
    ("common_dump_settings.iteration", ""),
    ("common_dump_settings.input_output", 3),
    ("common_dump_settings.kernels", 0),
    ("common_dump_settings.support_device", 0),
    ("common_dump_settings.op_debug_mode", 1),
    ("common_dump_settings.saved_data", ""),
    ("common_dump_settings.initial_iteration", -1),
    ("rankdump.codec", ""),
]


@pytest.mark.parametrize("index", range(len(ORDER)))
def test_first_error_in_mindspores_order_is_reported(tmp_path: Path, index: int):
    """Errors in rankdump's own section come last."""
    body: dict[str, dict[str, object]] = {
        "common_dump_settings": dict(COMMON),
        "e2e_dump_settings": dict(E2E),
        "rankdump": {},
    }
    for key, value in ORDER[index:]:
        section, name = key.split(".")
        body[section][name] = value
    assert refusal(tmp_path, body).key == ORDER[index][0]


def test_error_shows_the_beginning_of_a_long_value_only(tmp_path: Path):
    """What is allowed comes behind the value, and would not be seen behind a long one."""
    error = refusal(tmp_path, body_of(common={"net_name": "n" * 1000}))
    assert str(error).count("n") < 300
    assert "nnn... is not allowed; allowed: 1 to 255 letters" in str(error)


def test_number_in_the_place_of_iterations_is_shown_as_text(tmp_path: Path):
    """MindSpore 1.0 to 1.2 had a number here."""
    error = refusal(tmp_path, body_of(common={"iteration": 5}))
    assert str(error).endswith('"0|5-8|100-120"; here "5"')


def test_misspelt_section_of_rankdump_beside_dump_is_noted(tmp_path: Path):
    """Other sections may be there, since the file belongs to CANN."""
    body = {"dump": {}, "profiler": {}, "rankdmp": {"codec": "none"}}
    assert load_body(tmp_path, body).warnings == (
        "dump: {} enables nothing: no tensor is dumped",
        "rankdmp: {'codec': 'none'} is ignored: the nearest section is rankdump",
    )


def test_missing_file_of_a_path_that_a_shell_expands_says_so(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"can be read: rankdump does not expand ~$"):
        load_config_plan(Path("~/data_dump.json"), {})
